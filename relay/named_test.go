package relay_test

import (
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Its leases would last for an hour.
func TestRelay_AWorkerTakesTheLanesOfItsFormerRunAtOnce(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		b := startBroker(t, confirmAfter(0))
		spec := workerSpec{Name: "worker-1", UniqueName: true, Lease: time.Hour}
		box := p.box(t)
		first := startProcess(t, p, b, spec)
		eventually(t, "it has all lanes", func() bool { return p.leasesOf(t, spec.Name) == outbox.Lanes+1 })
		first.kill()
		all := keyed("k", 0, 20)
		commit(t, box, all...)
		second := startProcess(t, p, b, spec)
		p.awaitNothingOwed(t)
		second.end()
		wireOf(b).check(t, all, len(all))
	})
}

// Several workers may have one name if nobody has promised that it is unique.
func TestRelay_ASharedNameTakesNothing(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		const name = "orders-relay"
		box := p.box(t)
		now, until := "clock_timestamp()", "clock_timestamp() + interval '1 hour'"
		if !p.postgres() {
			now, until = "unixepoch() * 1000000", "(unixepoch() + 3600) * 1000000"
		}
		p.execute(t, `insert into {{relay_workers}} (owner, name, seen_until, ready, stopping) values ('other', $1, `+until+`, true, false)`, name)
		p.execute(t, `update {{relay_leases}} set owner = 'other', lease_until = `+until)
		start(t, box, &sink{name: name, wire: &wire{}}, relay.Config{})
		eventually(t, "it is at work", func() bool {
			return p.count(t, `select count(*) from {{relay_workers}} where name = $1 and owner <> 'other'`, name) == 1
		})
		if n := p.count(t, `select count(*) from {{relay_leases}} where owner = 'other' and lease_until > `+now); n != outbox.Lanes+1 {
			t.Errorf("%d lanes are left to the other worker", n)
		}
	})
}

func TestNew_AUniqueNameIsAName(t *testing.T) {
	t.Parallel()
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		var bad *oncemill.ConfigError
		if _, err := relay.New(p.box(t), &sink{wire: &wire{}}, relay.Config{UniqueName: true}); !errors.As(err, &bad) {
			t.Errorf("without a name: %v", err)
		}
	})
}
