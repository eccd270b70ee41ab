package relaystore

import (
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestRetries_DueKeepsToItsBounds(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		one, two := laneKey(1), laneKey(2)
		rows := p.publish(t, slices.Concat(named(one, 4), named(two, 4), loose(2))...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry), failing(rows[4], FateRetry), failing(rows[8], FateRetry), failing(rows[9], FateRetry)},
			slices.Concat(rows[1:4], rows[5:8])...)
		due, next := p.mustDue(t, 4, 2)
		if len(due) != 6 || next >= 0 {
			t.Errorf("due %v, next in %v", dueNames(due), next)
		}
		due, next = p.mustDue(t, 3, 1)
		if len(due) != 3 || next != 0 {
			t.Errorf("due %v, next in %v; want 3, and more at once", dueNames(due), next)
		}
		due, next = p.mustDue(t, 4, 4, rows[0].ID, rows[5].ID, rows[9].ID)
		slices.SortFunc(due, byID) // heads come by their times
		if got := dueNames(due); !slices.Equal(got, []string{rows[4].MessageID, rows[6].MessageID, rows[7].MessageID, rows[8].MessageID}) || next >= 0 {
			t.Errorf("due %v, next in %v", got, next)
		}
		for _, lanes := range [][]int{nil, {1, 2, 3}} {
			due, next, err := p.due(t.Context(), DueRequest{Lanes: lanes, Heads: 4, Rows: 4})
			if err != nil || len(due) != 0 || next >= 0 {
				t.Errorf("of lanes %v: due %v, next in %v, %v", lanes, dueNames(due), next, err)
			}
			if keys, err := p.Keys(t.Context(), lanes); err != nil || len(keys) != 0 {
				t.Errorf("of lanes %v: keys %v, %v", lanes, keys, err)
			}
			if commands, err := p.Commands(t.Context(), lanes, 4); err != nil || len(commands) != 0 {
				t.Errorf("of lanes %v: commands %v, %v", lanes, commands, err)
			}
		}
		// Of large messages so many that their bytes fit, but one at least.
		p.exec(t, `update {{parked}} set payload = $1 where key = $2`, make([]byte, keyBytes/2), one)
		p.exec(t, `update {{parked}} set payload = $1 where key = $2`, make([]byte, keyBytes*2), two)
		due, _ = p.mustDue(t, 4, 4, rows[8].ID, rows[9].ID)
		slices.SortFunc(due, byID)
		if got := dueNames(due); !slices.Equal(got, []string{rows[0].MessageID, rows[1].MessageID, rows[4].MessageID}) {
			t.Errorf("due of large ones: %v", got)
		}
	})
}

func TestRetries_CommandsAreTheOldestMessagesFirst(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, named(laneKey(1), 5)...)
		for _, i := range []int{3, 1, 4, 0, 2} {
			p.mustFail(t, []Failure{failing(rows[i], FateDeadLetter)})
		}
		for _, i := range []int{4, 0, 3, 1} {
			p.replay(t, p.letterOf(t, rows[i]))
		}
		commands, err := p.Commands(t.Context(), []int{1, testLane}, 3)
		if err != nil || len(commands) != 3 {
			t.Fatalf("commands %v, %v", commands, err)
		}
		for n, i := range []int{0, 1, 3} {
			if want := p.letterOf(t, rows[i]).ID; commands[n].DeadLetter != want {
				t.Errorf("command %d is of letter %d, want %d", n, commands[n].DeadLetter, want)
			}
		}
		// Letters of other lanes are not this owner's.
		p.exec(t, `update {{dead_letters}} set lane = 6 where row_id = $1`, rows[1].ID)
		parked, _ := p.mustCarryOut(t, commands[0].DeadLetter, commands[1].DeadLetter)
		p.expectDue(t, rows[0].MessageID)
		if len(parked) == 0 || p.letterOf(t, rows[1]).State != dlq.StateReplaying {
			t.Errorf("a letter of another lane was carried out; parked %v", parked)
		}
	})
}

// The time limit of attempts counts from the first failure, whatever a row has waited
// for before that. For how long it has been due comes apart.
func TestRetries_AgeIsThatOfTheFirstFailure(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, named(laneKey(1), 2)...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)}, rows[1])
		hour := `interval '1 hour'`
		if p.sqlite() {
			hour = `3600000000`
		}
		age := func() { p.exec(t, `update {{parked}} set parked_at = parked_at - `+hour) }
		age()
		due, _ := p.mustDue(t, 4, 4)
		if len(due) != 2 || due[0].Age < time.Hour || due[1].Age < time.Hour || due[0].Late < 0 || due[0].Late > time.Minute {
			t.Fatalf("due %+v", due)
		}
		p.exec(t, `update {{parked}} set next_at = next_at - `+hour)
		if due, _ = p.mustDue(t, 4, 4); len(due) != 2 || due[0].Late < time.Hour || due[1].Late != 0 {
			t.Fatalf("an hour late: %+v", due)
		}
		p.mustRemove(t, due[0])
		p.mustFail(t, []Failure{failingAgain(due[1], FateRetry)}) // its first
		due, _ = p.mustDue(t, 4, 4)
		if len(due) != 1 || due[0].Attempts != 1 || due[0].Age > time.Minute {
			t.Fatalf("after the first failure: %+v", due)
		}
		age()
		p.mustFail(t, []Failure{failingAgain(due[0], FateRetry)})
		if due, _ = p.mustDue(t, 4, 4); len(due) != 1 || due[0].Attempts != 2 || due[0].Age < time.Hour {
			t.Errorf("after the second failure: %+v", due)
		}
	})
}

// A message is not kept waiting by the backlog of another topic, which has waited for
// longer.
func TestRetries_TopicsTakeTurns(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		const backlog = 300
		rows := p.publish(t, loose(backlog+1)...)
		var failures []Failure
		for _, r := range rows {
			failures = append(failures, failing(r, FateRetry))
		}
		p.exec(t, `update {{outbox}} set topic = 'other' where id = $1`, rows[backlog].ID)
		p.mustFail(t, failures[:backlog])
		p.mustFail(t, failures[backlog:])
		due, next := p.mustDue(t, 4, 1)
		if len(due) != 4 || next != 0 || !slices.ContainsFunc(due, func(r Row) bool { return r.Topic == "other" }) {
			t.Errorf("due %v, next in %v; want %s among them", dueNames(due), next, rows[backlog].MessageID)
		}
	})
}

// What is due while a look is under way is for the next one, and lets nothing out whose
// time has not come.
func TestRetries_DueBringsOnlyWhatIsDue(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, loose(40)...)
		var failures []Failure
		for _, r := range rows {
			failures = append(failures, failing(r, FateRetry))
		}
		failures[0].RetryIn = time.Hour // the first row of all, which looks for nothing must not meet
		p.exec(t, `update {{outbox}} set topic = 'soon' where id = $1`, rows[1].ID)
		p.mustFail(t, failures)
		p.exec(t, `update {{parked}} set lane = 0 where id = $1`, rows[0].ID)
		var known []outboxstore.Known
		for _, r := range rows[2:] {
			known = append(known, r.Known())
		}
		in := `clock_timestamp() + $1::bigint * interval '1 microsecond'`
		if p.sqlite() {
			in = sqliteNow + ` + $1`
		}
		for look := range testserver.Rounds(100, 400) {
			p.exec(t, `update {{parked}} set next_at = `+in+` where id = $2`, 50+look*37%1500, rows[1].ID)
			var due []Row
			retried(t, func() (err error) {
				due, _, err = p.due(t.Context(), DueRequest{Lanes: allLanes(), Known: known, Heads: 64, Rows: 32})
				return err
			})
			for _, r := range due {
				if r.ID != rows[1].ID {
					t.Fatalf("look %d brought %s of lane %d", look, r.MessageID, r.Lane)
				}
			}
		}
	})
}

// One topic's first is known, its second is due in 1 s; another topic is due in 1 h.
func TestRetries_NextIsTheFirstOfAllTopics(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, loose(3)...)
		p.exec(t, `update {{outbox}} set topic = 'other' where id = $1`, rows[2].ID)
		var failures []Failure
		for _, r := range rows {
			failures = append(failures, failing(r, FateRetry))
		}
		failures[1].RetryIn, failures[2].RetryIn = time.Second, time.Hour
		p.mustFail(t, failures)
		var due []Row
		var next time.Duration
		eventually(t, "time passes", func() bool {
			due, next = p.mustDue(t, 10, 10, rows[0].ID)
			return next < time.Second
		})
		if len(due) != 0 || next > time.Second || next <= 0 {
			t.Errorf("due %v, next in %v, want none, and 1s at most", dueNames(due), next)
		}
	})
}
