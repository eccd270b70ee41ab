package relay

import (
	"maps"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
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
		type answer struct {
			held map[int]int64
			err  error
		}
		answers := make(chan answer, 1)
		go func() {
			held, err := s.beat(t.Context(), me, []int{1, 2}, longTerm)
			answers <- answer{held, err}
		}()
		if names.Dialect == oncemill.PostgreSQL { // on SQLite it waits for its turn as the writer
			eventuallyTrue(t, "the beat waits for the takeover", func() bool {
				var waiting int
				err := s.db.QueryRowContext(t.Context(), `select count(*) from pg_stat_activity where wait_event_type = 'Lock' and strpos(query, $1) > 0`,
					names.Table("relay_leases")).Scan(&waiting)
				return err == nil && waiting == 1
			})
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		got := <-answers
		if got.err != nil {
			if !sqlerr.Retryable(got.err) {
				t.Fatal(got.err)
			}
			got.held = s.mustBeat(t, me, []int{1, 2}, longTerm) // the isolation level makes it lose
		}
		if !maps.Equal(got.held, map[int]int64{2: 1}) {
			t.Errorf("the beat returned %v, want lane 2: lane 1 is another's", got.held)
		}
		leases, _ := s.mustCensus(t)
		if leases[1].owner != "b" || leases[1].left >= 0 || leases[2].left <= longTerm/2 {
			t.Errorf("lane 1 %+v, lane 2 %+v; want the second extended alone", leases[1], leases[2])
		}
	})
}
