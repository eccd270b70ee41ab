package relay_test

import (
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// A worker process is stopped past its lease with messages in its hands, another
// one takes over, and the first one goes on where it was.
func TestRelay_SendsRepeatsAtMostAfterItWasStoppedPastItsLease(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		p.watchTakeovers(t)
		keys := keysOfLane(3, 4)
		b := newBusiness(t, p, outbox.NoHistory, keys)
		broker := startBroker(t, func(frame) (outcome, time.Duration) { return confirmed, 0 })
		// The first worker holds back what it has of one key: its sink has it,
		// the broker does not.
		const each = 10
		spec := workerSpec{Lease: time.Second, History: outbox.NoHistory}
		spec.Name, spec.HoldBack = "first", keys[0]
		first := startProcess(t, p, broker, spec)
		p.awaitShares(t, map[string]int{"first": outbox.Lanes})
		for i := range each {
			for _, key := range keys {
				b.commit(t, key)
			}
			if i == 0 {
				eventually(t, "a message in the worker's hands", func() bool { return broker.held.Load() > 0 })
				p.outsideTransactions(t, func() { first.signal(syscall.SIGSTOP) })
			}
		}
		spec.Name, spec.HoldBack = "second", ""
		second := startProcess(t, p, broker, spec)
		p.awaitNothingOwed(t)
		before := len(broker.all())
		first.signal(syscall.SIGCONT)
		broker.releaseAll()
		eventually(t, "what the stopped worker had in its hands", func() bool { return len(broker.all()) > before })
		// It learns that its lanes are gone, and gets a fair share in good order.
		p.awaitShares(t, map[string]int{"first": outbox.Lanes / 2, "second": outbox.Lanes / 2})
		for _, key := range keys {
			b.commit(t, key)
		}
		p.awaitNothingOwed(t)
		first.end()
		second.end()
		n := 0
		for _, lost := range regexp.MustCompile(`msg="leases lost to another worker" worker=\S+ lanes="?\[([0-9 ]+)\]`).FindAllStringSubmatch(first.stderr.String(), -1) {
			n += len(strings.Fields(lost[1]))
		}
		if n < outbox.Lanes {
			t.Errorf("the stopped worker was refused the renewal of %d lanes, want all", n)
		}

		all := broker.all()
		arrived := map[string]bool{}
		for _, d := range all[:before] {
			arrived[d.MessageID] = true
		}
		stale := 0
		for _, d := range all[before:] {
			if d.By == "first" && arrived[d.MessageID] {
				stale++
			}
		}
		takeovers := p.takeovers(t)
		v := judge(b.journal(t, 0, 1000), all, takeovers)
		t.Logf("takeovers=%d sent again by the stopped worker=%d %v", len(takeovers), stale, v)
		if v.lost+v.invented+v.reordered+v.unexplained > 0 {
			t.Error("promises broken")
		}
		if stale == 0 {
			t.Error("the stopped worker sent nothing: the run says nothing")
		}
		if len(takeovers) < outbox.Lanes {
			t.Errorf("%d takeovers, want one of each lane at least", len(takeovers))
		}
	})
}

// A worker whose leases cannot be renewed, and that reads, publishes and deletes
// all the same, stops before its lanes are another's.
func TestRelay_StopsPublishingBeforeItsLeasesExpire(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, p testDB) {
		p.watchTakeovers(t)
		box, w := p.box(t), &wire{}
		all := spread(testserver.Rounds(32, 64), 200) // of each key one after the other: longer than the lease
		if !p.postgres() {
			all = spread(8, 200)
		}
		commit(t, box, all...)
		r := start(t, box, &sink{name: "unheard", wire: w, handle: slow(10 * time.Millisecond)}, short)
		w.await(t, 1)
		p.refuseHeartbeats(t, "unheard")
		start(t, box, &sink{name: "next", wire: w}, short)
		p.awaitNothingOwed(t)
		r.stop()

		taken := map[int]time.Time{}
		for _, o := range p.takeovers(t) {
			if _, ok := taken[o.lane]; !ok {
				taken[o.lane] = o.at
			}
		}
		before := 0
		for _, a := range w.all() {
			if at, ok := taken[a.lane]; a.by == "unheard" && ok {
				before++
				if !a.at.Before(at) {
					t.Errorf("lane %d: %s was published %v after another worker had taken the lane", a.lane, a.message, a.at.Sub(at))
					break
				}
			}
		}
		if before == 0 || w.by()["next"] == 0 {
			t.Errorf("published: %v; the run says nothing", w.by())
		}
		w.check(t, all, len(all)) // what it published and did not delete in time comes again
	})
}

// refuseHeartbeats makes the heartbeats of a worker fail, and nothing else.
func (p testDB) refuseHeartbeats(t testing.TB, name string) {
	t.Helper()
	if !p.postgres() {
		p.execute(t, `create trigger unheard before update on {{relay_workers}} when new.name = '`+name+`'
			begin select raise(abort, 'not heard'); end`)
		return
	}
	p.execute(t, `create function refuse() returns trigger language plpgsql as $$ begin raise 'not heard'; end $$`)
	p.execute(t, `create trigger unheard before update on {{relay_workers}} for each row
		when (new.name = '`+name+`') execute function refuse()`)
}
