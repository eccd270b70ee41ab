package relaystore

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

// A heartbeat that waits for a takeover under way began before it, and its
// snapshot shows the lane as the worker's still.
func TestLeases_ABeatThatMetATakeoverDoesNotHoldTheLane(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		names := database.Of(s.box.Config().Database)
		me := Identity{Owner: "a", Ready: true}
		s.mustBeat(t, me, nil, longTerm)
		s.mustTake(t, "a", []int{1, 2}, 2, shortTerm)
		s.awaitExpired(t, 1, 2)

		tx, err := s.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(t.Context(), names.Expand(`update {{relay_leases}} set owner = 'b', epoch = epoch + 1 where lane = 1`)); err != nil {
			t.Fatal(err)
		}
		if names.Dialect == oncemill.PostgreSQL { // on SQLite it would wait for its turn as the writer
			held := s.mustBeat(t, me, []int{1, 2}, longTerm)
			if !maps.Equal(held, map[int]Renewal{1: {Epoch: 1}, 2: {Epoch: 1, Renewed: true}}) {
				t.Errorf("beside the takeover the beat returned %+v, want lane 2 alone extended", held)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		held := s.mustBeat(t, me, []int{1, 2}, longTerm)
		if !maps.Equal(held, map[int]Renewal{2: {Epoch: 1, Renewed: true}}) {
			t.Errorf("the beat returned %+v, want lane 2: lane 1 is another's", held)
		}
		leases, _ := s.mustCensus(t)
		if leases[1].Owner != "b" || leases[1].Left >= 0 || leases[2].Left <= longTerm/2 {
			t.Errorf("lane 1 %+v, lane 2 %+v; want the second extended alone", leases[1], leases[2])
		}
	})
}

// Somebody has locked the rows of the other workers, the process of one that is frozen
// perhaps. A heartbeat forgets the dead among them later, and neither it nor the flush of
// RequireDurable waits. (SQLite has one writer at a time.)
func TestLeases_ALockedRowOfAnotherWorkerKeepsNoHeartbeatWaiting(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s leaseFixture) {
		names := database.Of(s.box.Config().Database)
		if names.Dialect == oncemill.SQLite {
			return
		}
		me := Identity{Owner: "a", Ready: true}
		s.mustBeat(t, me, nil, longTerm)
		s.mustTake(t, "a", []int{1}, 1, longTerm)
		s.mustBeat(t, Identity{Owner: "frozen", Ready: true}, nil, longTerm)
		s.mustBeat(t, Identity{Owner: "dead"}, nil, -2*time.Hour)
		workers := func() (n int) {
			t.Helper()
			if err := s.db.QueryRowContext(t.Context(), names.Expand(`select count(*) from {{relay_workers}}`)).Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		tx, err := s.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(t.Context(), names.Expand(`select from {{relay_workers}} where owner <> 'a' for update`)); err != nil {
			t.Fatal(err)
		}
		want := map[int]Renewal{1: {Epoch: 1, Renewed: true}}
		ctx, cancel := context.WithTimeout(t.Context(), longTerm/2) // what waits for the lock waits for longer
		defer cancel()
		for range 2 {
			held, err := s.Beat(ctx, me, []int{1}, longTerm)
			if err != nil || !maps.Equal(held, want) {
				t.Errorf("beside the lock the beat returned %+v, %v; want %+v", held, err, want)
			}
			if err := s.Flush(ctx, "a"); err != nil {
				t.Errorf("beside the lock: %v", err)
			}
		}
		if n := workers(); n != 3 {
			t.Errorf("%d workers are remembered beside the lock, want all three", n)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
		s.mustBeat(t, me, []int{1}, longTerm)
		if n := workers(); n != 2 {
			t.Errorf("%d workers are remembered once the lock is gone, want two: one has died", n)
		}
	})
}
