package relaystore

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

func TestRetries_ALetterSaysThatItsMessageMayHaveBeenDelivered(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, named(laneKey(1), 1)...)
		rows = append(rows, p.publish(t, named(laneKey(2), 1)...)...)
		rows = append(rows, p.publish(t, named(laneKey(3), 1)...)...)
		rows = append(rows, p.publish(t, named(laneKey(4), 1)...)...)
		unanswered := func(f Failure) Failure { f.Unanswered = true; return f }

		p.mustFail(t, []Failure{unanswered(failing(rows[0], FateDeadLetter))})
		p.mustFail(t, []Failure{unanswered(failing(rows[1], FateRetry))})
		if _, ok := find(p.expectDue(t, rows[1].MessageID), rows[1]); !ok {
			t.Error("the parked row does not know that an attempt had no answer")
		}
		p.mustFail(t, []Failure{failingAgain(Row{Row: rows[1], Attempts: 1}, FateDeadLetter)})
		p.mustFail(t, []Failure{unanswered(failing(rows[2], FateHoldKey))})
		p.mustFail(t, []Failure{failing(rows[3], FateDeadLetter)})
		for i, want := range []bool{true, true, true, false} {
			if got := p.letterOf(t, rows[i]).MayHaveBeenDelivered; got != want {
				t.Errorf("letter %d: may have been delivered %v", i, got)
			}
		}
	})
}

// It may have been delivered before it was a dead letter, and still says so when it is replayed.
func TestRetries_AReplayedMessageMayStillHaveBeenDelivered(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		for i, unanswered := range []bool{true, false} {
			row := p.publish(t, named(laneKey(1+i), 1)...)[0]
			f := failing(row, FateDeadLetter)
			f.Unanswered = unanswered
			p.mustFail(t, []Failure{f})
			l := p.letterOf(t, row)
			p.replay(t, l)
			if _, _, err := p.CarryOut(t.Context(), p.f, []int64{l.ID}); err != nil {
				t.Fatal(err)
			}
			if _, says := find(p.expectDue(t, row.MessageID), row); says != unanswered {
				t.Errorf("without an answer: %t; replayed, it says %t", unanswered, says)
			}
			if _, err := p.Remove(t.Context(), refsOf([]outboxstore.Row{row})); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func find(due []Row, r outboxstore.Row) (Row, bool) {
	for _, d := range due {
		if d.ID == r.ID {
			return d, d.Unanswered
		}
	}
	return Row{}, false
}

// What fails at no charge, in the outbox and again in parked, keeps its attempts.
func TestRetries_WhatFailsAtNoChargeOnlyWaits(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 2)...)
		free := failing(rows[0], FateRetry)
		free.Uncharged, free.Attempt = true, 0
		p.mustFail(t, []Failure{free}, rows[1])
		due := p.expectDue(t, named(key, 2)...)
		if due[0].Attempts != 0 || !due[0].Tried || due[1].Tried {
			t.Errorf("due %+v", due)
		}
		again := free
		again.Retrying, again.RetryIn = true, time.Hour
		p.mustFail(t, []Failure{again})
		if due, next := p.mustDue(t, 10, 10); len(due) != 0 || next < 59*time.Minute {
			t.Errorf("due %v, next in %v", dueNames(due), next)
		}
		charged := failingAgain(Row{Row: rows[0]}, FateRetry)
		p.mustFail(t, []Failure{charged})
		p.mustFail(t, []Failure{again}) // late, after a charge: it changes nothing
		if due := p.expectDue(t, named(key, 2)...); due[0].Attempts != 1 {
			t.Errorf("due %+v", due)
		}
	})
}

func TestRetries_FollowMovesTheRowsOfKeys(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		one, two, other := laneKey(1), laneKey(2), laneKey(3)
		first := p.publish(t, named(one, 6)...)
		p.publish(t, named(other, 3)...)
		second := p.publish(t, named(two, 3)...)
		p.mustFail(t, []Failure{failing(first[0], FateRetry)})
		// Of the second key nothing is in parked; its first row is being dealt with.
		known := []outboxstore.Known{second[0].Known()}
		moved := 0
		for {
			n, err := p.Follow(t.Context(), p.f, []string{one, two}, known, 4)
			if err != nil {
				t.Fatal(err)
			}
			moved += min(n, 4)
			if n < 4 {
				break
			}
		}
		want := append(named(other, 3), second[0].MessageID)
		var owed []string
		for _, r := range p.owed(t) {
			owed = append(owed, r.MessageID)
		}
		slices.Sort(owed)
		slices.Sort(want)
		if !slices.Equal(owed, want) {
			t.Errorf("in the outbox are %v, want %v", owed, want)
		}
		due, _ := p.mustDue(t, 10, 10)
		if len(due) != 8 {
			t.Errorf("due %v", dueNames(due))
		}
		for key, names := range map[string][]string{one: named(one, 6), two: named(two, 3)[1:]} {
			var got []string
			for _, r := range due {
				if r.Key == key {
					got = append(got, r.MessageID)
				}
			}
			if !slices.Equal(got, names) {
				t.Errorf("of %s are due %v, want %v", key, got, names)
			}
		}
		stale := p.f
		stale.Epoch--
		if _, err := p.Follow(t.Context(), stale, []string{other}, nil, 4); err == nil {
			t.Error("a former owner moved rows")
		}
	})
}

func TestRetries_LooksAtTopicsInTurn(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		const topics = 10
		rows := p.publish(t, loose(topics)...)
		var failures []Failure
		for i, r := range rows {
			p.exec(t, `update {{outbox}} set topic = $1 where id = $2`, fmt.Sprint("t", i), r.ID)
			failures = append(failures, failing(r, FateRetry))
		}
		failures[topics-1].RetryIn = time.Hour
		p.mustFail(t, failures)
		var names []string
		looks, after := 0, ""
		for {
			found, err := p.Due(t.Context(), DueRequest{Lanes: []int{testLane}, AfterTopic: after, Topics: 3, Heads: 10, Rows: 10, Bytes: 1 << 30})
			if err != nil {
				t.Fatal(err)
			}
			if looks++; len(found.Rows) > 3 {
				t.Errorf("a look at three topics found %v", dueNames(found.Rows))
			}
			names = append(names, dueNames(found.Rows)...)
			if after = found.More; after == "" {
				if found.Next < 59*time.Minute {
					t.Errorf("the last topic is due in %v", found.Next)
				}
				break
			}
		}
		if slices.Sort(names); len(names) != topics-1 || len(slices.Compact(names)) != topics-1 || looks < topics/3 {
			t.Errorf("%d looks found %v", looks, names)
		}
	})
}
