package relay

import (
	"maps"
	"testing"

	"github.com/oncemill/oncemill"
)

// A heartbeat that waits for a takeover under way began before it, and its
// snapshot shows the lane as the worker's still.
func TestLeases_ABeatThatMetATakeoverDoesNotHoldTheLane(t *testing.T) {
	eachLeaseStore(t, func(t *testing.T, s lessors) {
		names := s.box.Database()
		me := identity{owner: "a", ready: true}
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
			if !maps.Equal(held, map[int]renewal{1: {epoch: 1}, 2: {epoch: 1, renewed: true}}) {
				t.Errorf("beside the takeover the beat returned %+v, want lane 2 alone extended", held)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		held := s.mustBeat(t, me, []int{1, 2}, longTerm)
		if !maps.Equal(held, map[int]renewal{2: {epoch: 1, renewed: true}}) {
			t.Errorf("the beat returned %+v, want lane 2: lane 1 is another's", held)
		}
		leases, _ := s.mustCensus(t)
		if leases[1].owner != "b" || leases[1].left >= 0 || leases[2].left <= longTerm/2 {
			t.Errorf("lane 1 %+v, lane 2 %+v; want the second extended alone", leases[1], leases[2])
		}
	})
}
