package relay_test

import (
	"testing"

	"github.com/oncemill/oncemill/outbox"
)

// A worker has died, and then the server's clock was set back by an hour.
func TestRelay_TakesOverAlthoughTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		ahead := `clock_timestamp() + interval '1 hour'`
		if !p.postgres() {
			ahead = `cast(unixepoch('subsec') * 1000000 as integer) + 3600000000`
		}
		p.execute(t, `update {{relay_leases}} set owner = 'dead', epoch = 1, lease_until = `+ahead)
		p.execute(t, `insert into {{relay_workers}} (owner, name, seen_until, ready, stopping) values ('dead', 'dead', `+ahead+`, true, false)`)
		box, w := p.box(t), &wire{}
		msgs := spread(40, 2)
		commit(t, box, msgs...)
		start(t, box, &sink{name: "w", wire: w}, short)
		p.awaitShares(t, map[string]int{"w": outbox.Lanes})
		p.awaitNothingOwed(t)
		w.check(t, msgs, 0)
	})
}
