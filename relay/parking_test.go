package relay

import (
	"slices"
	"testing"
	"time"
)

func TestParking_AFailedMessageWaitsWithItsSuccessorsBehindIt(t *testing.T) {
	eachLot(t, func(t *testing.T, p *lot) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 4)...)
		one := failing(rows[0], retryLater)
		one.retryIn = time.Hour
		p.mustFail(t, []failure{one}, rows[1:3]...)
		if owed := p.owed(t); len(owed) != 1 || owed[0].ID != rows[3].ID {
			t.Errorf("owed are %v, want the last", owed)
		}
		due, next := p.mustDue(t, 10, 10)
		if len(due) != 0 || next < 59*time.Minute || next > time.Hour {
			t.Errorf("due are %v, next in %v, want none and an hour", dueNames(due), next)
		}
		if got := p.keys(t); !slices.Equal(got, []parkedKey{{lotLane, key}}) {
			t.Errorf("parked keys %v", got)
		}
		r, parked, found, err := p.find(t.Context(), lotLane, rows[0].ID)
		if err != nil || !parked || !found || r.attempts != 1 || r.MessageID != rows[0].MessageID || r.Key != key || string(r.Payload) != string(rows[0].Payload) || !r.CreatedAt.Equal(rows[0].CreatedAt) {
			t.Errorf("found %+v, %v, %v, %v", r, parked, found, err)
		}
		r, parked, found, err = p.find(t.Context(), lotLane, rows[3].ID)
		if err != nil || parked || !found || r.attempts != 0 || r.MessageID != rows[3].MessageID {
			t.Errorf("found %+v, %v, %v, %v", r, parked, found, err)
		}
		if _, _, found, err := p.find(t.Context(), lotLane, 999); found || err != nil {
			t.Errorf("found what is not there, %v", err)
		}
		two := failingAgain(parkedRow{Row: rows[0], attempts: 1}, retryLater)
		p.mustFail(t, []failure{two}, rows[3])
		due = p.expectDue(t, named(key, 4)...)
		if due[0].attempts != 2 || due[1].attempts != 0 || due[0].age < 0 || due[0].age > time.Minute {
			t.Errorf("due %+v", due)
		}
		for i := range due {
			unparked := p.mustSettle(t, due[i])
			if want := i == len(due)-1; (len(unparked) == 1) != want {
				t.Errorf("unparked %v after %d", unparked, i)
			}
			p.expectDue(t, named(key, 4)[i+1:]...)
		}
		if got := p.keys(t); len(got) != 0 {
			t.Errorf("parked keys %v", got)
		}
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 4 {
			t.Errorf("the history has %d messages, want 4", n)
		}
	})
}
