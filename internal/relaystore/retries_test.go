package relaystore

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

func TestRetries_AFailedMessageWaitsWithItsSuccessorsBehindIt(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 4)...)
		one := failing(rows[0], FateRetry)
		one.RetryIn = time.Hour
		p.mustFail(t, []Failure{one}, rows[1:3]...)
		if owed := p.owed(t); len(owed) != 1 || owed[0].ID != rows[3].ID {
			t.Errorf("owed are %v, want the last", owed)
		}
		due, next := p.mustDue(t, 10, 10)
		if len(due) != 0 || next < 59*time.Minute || next > time.Hour {
			t.Errorf("due are %v, next in %v, want none and an hour", dueNames(due), next)
		}
		if got := p.keys(t); !slices.Equal(got, []Key{{testLane, key}}) {
			t.Errorf("parked keys %v", got)
		}
		r, parked, found, err := p.Find(t.Context(), testLane, rows[0].ID)
		if err != nil || !parked || !found || r.Attempts != 1 || r.MessageID != rows[0].MessageID || r.Key != key || r.Payload != nil || !r.CreatedAt.Equal(rows[0].CreatedAt) {
			t.Errorf("found %+v, %v, %v, %v", r, parked, found, err)
		}
		r, parked, found, err = p.Find(t.Context(), testLane, rows[3].ID)
		if err != nil || parked || !found || r.Attempts != 0 || r.MessageID != rows[3].MessageID {
			t.Errorf("found %+v, %v, %v, %v", r, parked, found, err)
		}
		if _, _, found, err := p.Find(t.Context(), testLane, 999); found || err != nil {
			t.Errorf("found what is not there, %v", err)
		}
		two := failingAgain(Row{Row: rows[0], Attempts: 1}, FateRetry)
		p.mustFail(t, []Failure{two}, rows[3])
		due = p.expectDue(t, named(key, 4)...)
		if due[0].Attempts != 2 || due[1].Attempts != 0 || due[0].Age < 0 || due[0].Age > time.Minute {
			t.Errorf("due %+v", due)
		}
		for i := range due {
			unparked := p.mustRemove(t, due[i])
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

func (p *fixture) mustCarryOut(t *testing.T, letters ...int64) (parked, unparked []Key) {
	t.Helper()
	parked, unparked, err := p.CarryOut(t.Context(), p.f, letters)
	if err != nil {
		t.Fatal(err)
	}
	return parked, unparked
}

func (p *fixture) mustCommands(t *testing.T) []Command {
	t.Helper()
	commands, err := p.Commands(t.Context(), allLanes(), 100)
	if err != nil {
		t.Fatal(err)
	}
	return commands
}

func (p *fixture) letters(t *testing.T) *dlq.Store {
	t.Helper()
	s, err := dlq.New(p.db, dlq.Config{Database: p.box.Config().Database})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// letterOf returns the newest letter of a message.
func (p *fixture) letterOf(t *testing.T, r outboxstore.Row) *dlq.Letter {
	t.Helper()
	list, err := p.letters(t).List(t.Context(), dlq.Filter{MessageID: r.MessageID})
	if err != nil || len(list) == 0 {
		t.Fatalf("letters of %s: %v, %v", r.MessageID, list, err)
	}
	l, err := p.letters(t).Get(t.Context(), list[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (p *fixture) replay(t *testing.T, l *dlq.Letter) {
	t.Helper()
	if _, err := p.letters(t).Replay(t.Context(), []int64{l.ID}, dlq.Act{By: "ada"}); err != nil {
		t.Fatal(err)
	}
}

func TestRetries_ALetterHoldsTheWholeMessageAndWhy(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		r := p.publish(t, named(key, 1)...)[0]
		p.mustFail(t, []Failure{failing(r, FateRetry)})
		for n := 2; n <= 12; n++ {
			one := failingAgain(Row{Row: r, Attempts: n - 1}, FateRetry)
			one.Class, one.Text = "crashed", fmt.Sprintf("attempt %d\x00 \xff%s", n, strings.Repeat("x", 10_000))
			p.mustFail(t, []Failure{one})
		}
		if due := p.expectDue(t, r.MessageID); due[0].Attempts != 12 || !due[0].Crashed {
			t.Errorf("due %d attempts, crashed %v", due[0].Attempts, due[0].Crashed)
		}
		last := failingAgain(Row{Row: r, Attempts: 12}, FateDeadLetter)
		last.Text = "too large: 1048577 bytes of " + r.MessageID
		p.mustFail(t, []Failure{last})
		l := p.letterOf(t, r)
		if l.State != dlq.StateDead || l.Source != dlq.FromRelay || l.Lane != testLane || l.RowID != r.ID || l.Topic != r.Topic || l.MessageID != r.MessageID || l.Key != key ||
			string(l.Payload) != string(r.Payload) || l.Metadata[outbox.KeyMetadata] != key || !l.CreatedAt.Equal(r.CreatedAt) || l.DiedAt.Before(l.CreatedAt) ||
			l.Reason != "refused" || l.Error != last.Text || l.Tries != 13 || l.Consumer != "" {
			t.Errorf("letter %+v", l)
		}
		if len(l.Attempts) != 10 || l.Attempts[9].Class != "refused" || l.Attempts[9].Error != last.Text || !strings.HasPrefix(l.Attempts[0].Error, "attempt 4") || l.Attempts[0].Class != "crashed" || l.Attempts[0].At.Before(r.CreatedAt) || l.Attempts[0].At.After(l.DiedAt) {
			t.Errorf("attempts %v", l.Attempts)
		}
		for _, a := range l.Attempts {
			if len(a.Error) > 10_000 || !utf8.ValidString(a.Error) || strings.Contains(a.Error, "\x00") {
				t.Errorf("an attempt keeps %d bytes: %.40q", len(a.Error), a.Error)
			}
		}
		other := p.publish(t, named(laneKey(2), 1)...)[0]
		alike := failing(other, FateDeadLetter)
		alike.Text = "too large: 2000000 bytes of " + other.MessageID
		p.mustFail(t, []Failure{alike})
		if got := p.letterOf(t, other).Fingerprint; got != l.Fingerprint {
			t.Errorf("fingerprints %s and %s", got, l.Fingerprint)
		}
	})
}

// Policy ExhaustedSkip: the successors of a dead letter flow, and its replay takes its
// place among those that are parked by then.
func TestRetries_AReplayComesBackInItsPlace(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 5)...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)}, rows[1])
		// The first one dies; its successor is due at once.
		p.mustFail(t, []Failure{failingAgain(Row{Row: rows[0], Attempts: 1}, FateDeadLetter)})
		due := p.expectDue(t, rows[1].MessageID)
		// That one dies too, and the key is free.
		p.mustFail(t, []Failure{failingAgain(due[0], FateDeadLetter)})
		if got := p.keys(t); len(got) != 0 {
			t.Errorf("parked keys %v", got)
		}
		// A later one is parked, with a successor, and waits for an hour.
		later := failing(rows[3], FateRetry)
		later.RetryIn = time.Hour
		p.mustFail(t, []Failure{later}, rows[4])
		// Now the second and then the first are replayed.
		for _, r := range []outboxstore.Row{rows[1], rows[0]} {
			p.replay(t, p.letterOf(t, r))
		}
		commands := p.mustCommands(t)
		if len(commands) != 2 || commands[0].DeadLetter != p.letterOf(t, rows[0]).ID || commands[0].Lane != testLane || commands[0].Key != key {
			t.Fatalf("commands %+v, want that of the first message first", commands)
		}
		// Carried out one by one, and in the wrong order.
		parked, unparked := p.mustCarryOut(t, commands[1].DeadLetter)
		expectKeys(t, "parked", parked, []Key{{testLane, key}})
		expectKeys(t, "unparked", unparked, nil)
		p.expectDue(t, rows[1].MessageID, rows[3].MessageID, rows[4].MessageID)
		p.mustCarryOut(t, commands[0].DeadLetter)
		due = p.expectDue(t, rows[0].MessageID, rows[1].MessageID, rows[3].MessageID, rows[4].MessageID)
		if due[0].Attempts != 0 || due[0].Age > time.Minute {
			t.Errorf("replayed as %+v", due[0])
		}
		if n := len(p.mustCommands(t)); n != 0 {
			t.Errorf("%d commands are left", n)
		}
		// In order to the end, with a replay that fails again on its way.
		p.mustFail(t, []Failure{failingAgain(due[0], FateDeadLetter)})
		p.expectDue(t, rows[1].MessageID, rows[3].MessageID, rows[4].MessageID)
		p.mustRemove(t, due[1])
		p.expectDue(t, rows[3].MessageID, rows[4].MessageID) // its hour is over with its predecessors
		p.mustRemove(t, due[2])
		expectKeys(t, "unparked", p.mustRemove(t, due[3]), []Key{{testLane, key}})
		all, err := p.letters(t).List(t.Context(), dlq.Filter{MessageID: rows[0].MessageID, OldestFirst: true})
		if err != nil || len(all) != 2 || all[0].State != dlq.StateReplayed || all[1].State != dlq.StateDead || all[1].Tries != 1 {
			t.Errorf("letters %+v, %v", all, err)
		}
	})
}

func TestRetries_AHeldMessageHoldsItsKeyUntilAnOperatorDecides(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 4)...)
		p.mustFail(t, []Failure{failing(rows[0], FateHoldKey)}, rows[1:3]...)
		held := p.letterOf(t, rows[0])
		if held.State != dlq.StateHeld || string(held.Payload) != string(rows[0].Payload) {
			t.Errorf("letter %+v", held)
		}
		if due, next := p.mustDue(t, 10, 10); len(due) != 0 || next >= 0 {
			t.Errorf("due behind a held message: %v, next in %v", dueNames(due), next)
		}
		expectKeys(t, "parked", p.keys(t), []Key{{testLane, key}}) // what a takeover finds
		// Released in place.
		p.replay(t, held)
		p.mustCarryOut(t, held.ID)
		due := p.expectDue(t, named(key, 3)...)
		if due[0].Attempts != 0 {
			t.Errorf("released with %d attempts", due[0].Attempts)
		}
		// It fails again: held again, with a new letter.
		p.mustFail(t, []Failure{failingAgain(due[0], FateRetry)})
		p.mustFail(t, []Failure{failingAgain(Row{Row: rows[0], Attempts: 1}, FateHoldKey)})
		again := p.letterOf(t, rows[0])
		if again.ID == held.ID || again.State != dlq.StateHeld || again.Tries != 2 {
			t.Errorf("letter %+v after %+v", again, held)
		}
		if due, _ := p.mustDue(t, 10, 10); len(due) != 0 {
			t.Errorf("due behind a held message: %v", dueNames(due))
		}
		// Discarded: what follows is due.
		if err := p.letters(t).Discard(t.Context(), again.ID, dlq.Act{By: "ada", Reason: "obsolete"}); err != nil {
			t.Fatal(err)
		}
		parked, _ := p.mustCarryOut(t, again.ID)
		expectKeys(t, "parked", parked, []Key{{testLane, key}})
		due = p.expectDue(t, rows[1].MessageID, rows[2].MessageID)
		p.mustFail(t, []Failure{failingAgain(due[0], FateHoldKey)}, rows[3])
		last := p.letterOf(t, rows[1])
		p.mustFail(t, nil)
		if err := p.letters(t).Discard(t.Context(), last.ID, dlq.Act{By: "ada", Reason: "obsolete"}); err != nil {
			t.Fatal(err)
		}
		p.mustCarryOut(t, last.ID)
		due = p.expectDue(t, rows[2].MessageID, rows[3].MessageID)
		p.mustRemove(t, due...)
		if n := p.count(t, `select count(*) from {{outbox_history}}`); n != 2 {
			t.Errorf("%d messages in the history, want 2", n)
		}
		if l := p.letterOf(t, rows[1]); l.State != dlq.StateDiscarded || l.Act.Reason != "obsolete" || l.ClosedAt.IsZero() {
			t.Errorf("letter %+v", l)
		}
		p.expectSound(t, 4, 0)
	})
}

// A replayed message comes before one that holds its key. What is behind that one waits on.
func TestRetries_NothingIsDueBehindAHeldMessage(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, named(laneKey(1), 3)...)
		p.mustFail(t, []Failure{failing(rows[0], FateDeadLetter)})
		p.mustFail(t, []Failure{failing(rows[1], FateHoldKey)}, rows[2])
		dead := p.letterOf(t, rows[0])
		p.replay(t, dead)
		p.mustCarryOut(t, dead.ID)
		p.expectDue(t, rows[0].MessageID)
	})
}

// A worker that lost its lane hears the broker's confirm when the next owner has
// given the message up.
func TestRetries_AConfirmThatComesLateClosesTheLetter(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, slices.Concat(named(key, 2), loose(1))...)
		p.mustFail(t, []Failure{failing(rows[0], FateHoldKey), failing(rows[2], FateRetry)}, rows[1])
		p.mustFail(t, []Failure{failingAgain(Row{Row: rows[2], Attempts: 1}, FateDeadLetter)})
		for _, r := range []outboxstore.Row{rows[2], rows[0]} { // the first is only a letter by now
			if _, err := p.Remove(t.Context(), []outboxstore.Ref{r.Ref}); err != nil {
				t.Fatal(err)
			}
		}
		p.expectDue(t, rows[1].MessageID)
		for _, r := range []outboxstore.Row{rows[0], rows[2]} {
			if l := p.letterOf(t, r); l.State != dlq.StateReplayed || l.Act.By != "relay" || l.Act.Reason == "" || l.ClosedAt.IsZero() {
				t.Errorf("letter %+v", l)
			}
		}
	})
}

func TestRetries_RowsAreMatchedByTheirWholeIdentity(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, loose(4)...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry), failing(rows[1], FateRetry)})
		before := p.dump(t)
		for _, change := range []func(*outboxstore.Ref){
			func(r *outboxstore.Ref) { r.MessageID = "another" },
			func(r *outboxstore.Ref) { r.CreatedAt = r.CreatedAt.Add(time.Microsecond) },
			func(r *outboxstore.Ref) { r.ID += 100 },
		} {
			for _, v := range []Fate{FateRetry, FateDeadLetter, FateHoldKey} {
				parked, owed := failingAgain(Row{Row: rows[0], Attempts: 1}, v), failing(rows[2], v)
				change(&parked.Ref)
				change(&owed.Ref)
				follower := rows[3].Ref
				change(&follower)
				if err := p.Fail(t.Context(), p.f, []Failure{parked, owed}, []outboxstore.Ref{follower}); err != nil {
					t.Fatal(err)
				}
				if _, err := p.Remove(t.Context(), []outboxstore.Ref{parked.Ref}); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got := p.dump(t); got != before {
			t.Errorf("rows of the same id were taken:\n%s before\n%s", got, before)
		}
	})
}

func TestRetries_ABrokenHistoryStopsNothing(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		key := laneKey(1)
		rows := p.publish(t, named(key, 3)...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)}, rows[1:]...)
		p.exec(t, `alter table {{outbox_history}} rename to elsewhere`)
		removal, err := p.Remove(t.Context(), refsOf(rows[:2]))
		if err != nil || removal.Missed != 2 || len(removal.Ended) != 0 {
			t.Errorf("removed: %+v, %v", removal, err)
		}
		p.expectDue(t, rows[2].MessageID)
		removal, err = p.Remove(t.Context(), refsOf(rows))
		if err != nil || removal.Missed != 1 || len(removal.Ended) != 1 {
			t.Errorf("removed: %+v, %v", removal, err)
		}
	})
}

func byID(a, b Row) int { return int(a.ID - b.ID) }
