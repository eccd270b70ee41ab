package relay_test

import (
	"os"
	"testing"
	"time"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// Its leases would last for an hour.
func TestRelay_AWorkerTakesTheLanesOfItsFormerRunAtOnce(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p place) {
		b := startBroker(t, confirmAfter(0))
		spec := workerSpec{Name: "worker-1", Lease: time.Hour}
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

// Hosts run several workers, of one name that nobody has given them.
func TestRelay_AHostsNameIsNoNameOfItsOwn(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p place) {
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		box := p.box(t)
		now, until := "clock_timestamp()", "clock_timestamp() + interval '1 hour'"
		if !p.postgres() {
			now, until = "unixepoch() * 1000000", "(unixepoch() + 3600) * 1000000"
		}
		p.execute(t, `insert into {{relay_workers}} (owner, name, seen_until, ready, stopping) values ('other', $1, `+until+`, true, false)`, host)
		p.execute(t, `update {{relay_leases}} set owner = 'other', lease_until = `+until)
		start(t, box, &sink{wire: &wire{}}, relay.Config{})
		eventually(t, "it is at work", func() bool { return p.count(t, `select count(*) from {{relay_workers}} where name = $1 and owner <> 'other'`, host) == 1 })
		if n := p.count(t, `select count(*) from {{relay_leases}} where owner = 'other' and lease_until > `+now); n != outbox.Lanes+1 {
			t.Errorf("%d lanes are left to the other worker", n)
		}
	})
}
