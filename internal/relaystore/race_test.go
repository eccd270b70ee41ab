package relaystore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// retried calls fn until it does not lose against others any more, nor its connection: the
// server ends transactions that a machine without time to spare has left alone for 2 s.
func retried(t testing.TB, fn func() error) {
	t.Helper()
	for range 1000 {
		err := fn()
		if err == nil {
			return
		}
		if !sqlerr.Retryable(err) && !sqlerr.TimedOut(err) && !sqlerr.Connection(err) && !bounded.Silence(err) && !errors.Is(err, context.Canceled) {
			t.Error(err)
			return
		}
	}
	t.Error("loses for ever")
}

// expectSound looks for messages in two places or none, and for rows with a time
// that should have none, or none that should have one.
//
// Some that the history has missed may be known all the same, by a letter.
func (p *fixture) expectSound(t testing.TB, messages, missed int) {
	t.Helper()
	if n := p.count(t, `
		select count(*) from {{parked}} p
		where (p.next_at is not null) <> (not p.held and (p.key = '' or not exists (
			select 1 from {{parked}} q where q.lane = p.lane and q.key = p.key and q.id < p.id)))`); n != 0 {
		t.Errorf("%d rows with a wrong time:\n%s", n, p.dump(t))
	}
	const places = `
		select message_id from {{outbox}}
		union all select message_id from {{parked}}
		union all select message_id from {{outbox_history}}
		union all select message_id from {{dead_letters}} where state in ('dead', 'replaying') and not held or state = 'discarded'`
	// One that an operator replayed may have been delivered before.
	if n := p.count(t, `
		select count(*) from (select message_id from (`+places+`) m group by message_id having count(*) > 1) twice
		where message_id not in (select message_id from {{dead_letters}} where state = 'replayed' and acted_by <> 'relay')`); n != 0 {
		t.Errorf("%d messages in two places:\n%s", n, p.dump(t))
	}
	if n := p.count(t, `select count(distinct message_id) from (`+places+` union all select message_id from {{dead_letters}} where state = 'replayed') m`); n < messages-missed || n > messages {
		t.Errorf("%d messages in all places, want %d; the history has missed %d:\n%s", n, messages, missed, p.dump(t))
	}
	if n := p.count(t, `
		select count(*) from {{dead_letters}} d
		where d.held and d.state in ('held', 'replaying', 'discarding')
			and not exists (select 1 from {{parked}} p where p.lane = d.lane and p.id = d.row_id and p.held)`); n != 0 {
		t.Errorf("%d letters of messages that are not held:\n%s", n, p.dump(t))
	}
}

// While the owner parks, gives up and takes back, former owners whose confirms
// came late settle the same rows. No key is left without a head that is due.
func TestRetries_LateConfirmsOfFormerOwnersLeaveEveryKeyItsHead(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rounds, each := 3, 20
		if p.sqlite() {
			rounds = 2
		}
		letters, err := dlq.New(p.db, dlq.Config{Database: p.box.Config().Database})
		if err != nil {
			t.Fatal(err)
		}
		for round := range rounds {
			for _, table := range []string{"parked", "dead_letters", "outbox_history"} {
				p.exec(t, `delete from {{`+table+`}}`)
			}
			key := laneKey(1)
			var names []string
			for i := range each {
				names = append(names, fmt.Sprintf("%s/%d-%d", key, round, i))
			}
			rows := p.publish(t, names...)
			all := rows
			someDue := func(heads, most int) (due []Row) {
				retried(t, func() (err error) {
					due, _, err = p.due(t.Context(), DueRequest{Lanes: []int{testLane}, Heads: heads, Rows: most})
					return err
				})
				return due
			}
			working, stop := context.WithCancel(t.Context())
			var settlers, owner sync.WaitGroup
			var missed atomic.Int64 // by the history, where a lock on it lasts too long
			for range 3 {
				settlers.Go(func() {
					for working.Err() == nil {
						r := all[rand.IntN(len(all))]
						if rand.IntN(3) > 0 { // the head, mostly
							due := someDue(1, 2)
							if len(due) == 0 {
								continue
							}
							r = due[rand.IntN(len(due))].Row
						}
						retried(t, func() error {
							removal, err := p.Remove(t.Context(), []outboxstore.Ref{r.Ref})
							missed.Add(int64(removal.Missed))
							return err
						})
					}
				})
			}
			owner.Go(func() {
				for len(rows) > 0 {
					n := min(len(rows), 1+rand.IntN(3))
					one := failing(rows[0], []Fate{FateRetry, FateRetry, FateHoldKey}[rand.IntN(3)])
					retried(t, func() error { return p.Fail(t.Context(), p.f, []Failure{one}, refsOf(rows[1:n])) })
					rows = rows[n:]
					if due := someDue(1, 3); len(due) > 0 {
						one := failingAgain(due[rand.IntN(len(due))], []Fate{FateRetry, FateDeadLetter, FateHoldKey}[rand.IntN(3)])
						retried(t, func() error { return p.Fail(t.Context(), p.f, []Failure{one}, nil) })
					}
					var open []*dlq.Letter
					retried(t, func() (err error) {
						open, err = letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead, dlq.StateHeld}})
						return err
					})
					var ids []int64
					for _, l := range open {
						if rand.IntN(2) == 0 {
							letters.Discard(t.Context(), l.ID, dlq.Act{By: "b", Reason: "r"}) // may be delivered by now
						} else {
							letters.Replay(t.Context(), []int64{l.ID}, dlq.Act{By: "b"})
						}
						ids = append(ids, l.ID)
					}
					retried(t, func() error {
						_, _, err := p.CarryOut(t.Context(), p.f, ids)
						return err
					})
				}
			})
			owner.Wait()
			stop()
			settlers.Wait()
			if t.Failed() {
				return
			}
			p.expectSound(t, each, int(missed.Load()))
		}
	})
}

// A settlement that has waited for the write of a follower behind its row looks
// for that follower with newer eyes.
func TestRetries_ASettlementSeesTheFollowerThatItWaitedFor(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		if p.sqlite() {
			return // one writer at a time
		}
		rows := p.publish(t, named(laneKey(1), 2)...)
		p.mustFail(t, []Failure{failing(rows[0], FateRetry)})
		tx, err := p.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		var pid, stood int
		if err := tx.QueryRowContext(t.Context(), `select pg_backend_pid()`).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		args := []any{p.f.Lane, p.f.Owner, p.f.Epoch}
		args = append(append(args, failureArgs([]Failure{{Ref: rows[1].Ref}})...), pq.Array([]int64{kindFollower}))
		if err := tx.QueryRowContext(t.Context(), p.Store.(*postgres).q.Retry, args...).Scan(&stood); err != nil || stood != 1 {
			t.Fatalf("parked: %d, %v", stood, err)
		}
		answer := make(chan error, 1)
		go func() {
			_, err := p.Remove(t.Context(), []outboxstore.Ref{rows[0].Ref})
			answer <- err
		}()
		p.awaitBlocked(t, pid)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		expectErr(t, <-answer, nil)
		p.expectDue(t, rows[1].MessageID)
	})
}

// A fenced write that has to wait for a takeover finds that it came too late.
func TestRetries_AWriteThatWaitsForATakeoverIsFenced(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		if p.sqlite() {
			return // one writer at a time
		}
		rows := p.publish(t, slices.Concat(named(laneKey(1), 3), named(laneKey(2), 3))...)
		p.mustFail(t, []Failure{failing(rows[3], FateHoldKey), failing(rows[0], FateRetry)})
		before := p.dump(t)
		held := p.count(t, `select max(id) from {{dead_letters}}`)
		p.exec(t, `update {{dead_letters}} set state = 'discarding'`)
		due := p.expectDue(t, rows[0].MessageID)
		for name, write := range map[string]func() error{
			"fail":        func() error { return p.Fail(t.Context(), p.f, []Failure{failing(rows[1], FateRetry)}, nil) },
			"dead-letter": func() error { return p.Fail(t.Context(), p.f, []Failure{failing(rows[1], FateDeadLetter)}, nil) },
			"follow":      func() error { return p.Fail(t.Context(), p.f, nil, refsOf(rows[1:2])) },
			"again":       func() error { return p.Fail(t.Context(), p.f, []Failure{failingAgain(due[0], FateRetry)}, nil) },
			"skip":        func() error { return p.Fail(t.Context(), p.f, []Failure{failingAgain(due[0], FateDeadLetter)}, nil) },
			"hold":        func() error { return p.Fail(t.Context(), p.f, []Failure{failingAgain(due[0], FateHoldKey)}, nil) },
			"nothing":     func() error { return p.Fail(t.Context(), p.f, nil, nil) },
			"alone":       func() error { return p.SetAlone(t.Context(), p.f, 42) },
			"carryOut":    func() error { _, _, err := p.CarryOut(t.Context(), p.f, []int64{int64(held)}); return err },
		} {
			tx, err := p.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				t.Fatal(err)
			}
			var pid int
			if err := tx.QueryRowContext(t.Context(), `select pg_backend_pid()`).Scan(&pid); err != nil {
				t.Fatal(err)
			}
			takeover := database.Of(p.box.Config().Database).Expand(`update {{relay_leases}} set owner = 'another', epoch = epoch + 1
				where lane in (select lane from {{relay_leases}} where lane = $1 for update)`)
			if _, err := tx.ExecContext(t.Context(), takeover, testLane); err != nil {
				t.Fatal(err)
			}
			answer := make(chan error, 1)
			go func() { answer <- write() }()
			p.awaitBlocked(t, pid)
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			err = <-answer
			if sqlerr.Retryable(err) { // the higher isolation levels
				err = write()
			}
			expectErr(t, err, ErrFenced)
			p.exec(t, `update {{dead_letters}} set state = 'held'`)
			if got := p.dump(t); got != before {
				t.Errorf("%s: a stale write changed\n%s to\n%s", name, before, got)
			}
			p.exec(t, `update {{dead_letters}} set state = 'discarding'`)
			p.f = p.own(t, "owner")
		}
	})
}

// awaitBlocked waits until somebody waits for a server process.
func (p *fixture) awaitBlocked(t *testing.T, pid int) {
	t.Helper()
	eventually(t, "somebody waits", func() bool {
		return p.count(t, `select count(*) from pg_stat_activity where $1 = any (pg_blocking_pids(pid))`, pid) > 0
	})
}

// A fenced write under way holds a takeover up, and the owner's renewal not.
func TestRetries_AWriteUnderWayExcludesATakeoverOnly(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		if p.sqlite() {
			return // one writer at a time
		}
		rows := p.publish(t, named(laneKey(1), 2)...)
		// Somebody else's lock on its row keeps the write under way.
		tx, err := p.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		var pid int
		if err := tx.QueryRowContext(t.Context(), database.Of(p.box.Config().Database).Expand(`select pg_backend_pid() from {{outbox}} where id = $1 for update`), rows[0].ID).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		answer := make(chan error, 1)
		patient, cancelFail := context.WithTimeout(t.Context(), 20*time.Minute) // so long are its limits
		defer cancelFail()
		go func() { answer <- p.Fail(patient, p.f, []Failure{failing(rows[0], FateRetry)}, refsOf(rows[1:])) }()
		p.awaitBlocked(t, pid)
		soon, cancel := context.WithTimeout(t.Context(), longTerm/6)
		defer cancel()
		if held, err := p.Beat(soon, Identity{Owner: p.f.Owner}, []int{testLane}, longTerm); err != nil || held[testLane].Epoch != p.f.Epoch {
			t.Fatalf("the renewal: %v, %v", held, err)
		}
		p.exec(t, `update {{relay_leases}} set lease_until = `+p.longAgo()+` where lane = $1`, testLane)
		if got, err := p.Take(t.Context(), "another", []int{testLane}, 1, longTerm); err != nil || len(got) != 0 {
			t.Errorf("took %v from under a write, %v", got, err)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
		expectErr(t, <-answer, nil)
		if got, err := p.Take(t.Context(), "another", []int{testLane}, 1, longTerm); err != nil || len(got) != 1 {
			t.Errorf("took %v after the write, %v", got, err)
		}
		p.expectDue(t, named(laneKey(1), 2)...)
	})
}
