package relaystore

import (
	"testing"
	"time"
)

func TestStore_WaitingCountsUpToALimit(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		expect := func(what string, most int, want Waiting) {
			t.Helper()
			if got, err := p.Waiting(t.Context(), most); err != nil || got != want {
				t.Errorf("%s: %+v, want %+v, %v", what, got, want, err)
			}
		}
		expect("nothing waits", 10, Waiting{})
		retrying, held := named(laneKey(1), 3), named(laneKey(2), 2)
		first, second := p.publish(t, retrying...), p.publish(t, held...)
		p.mustFail(t, []Failure{failing(first[0], FateRetry), failing(second[0], FateHoldKey)}, append(first[1:], second[1:]...)...)
		expect("a retry and a held key", 10, Waiting{Retrying: 1, HeldKeys: 1, All: 5})
		expect("up to one", 1, Waiting{Retrying: 1, HeldKeys: 1, All: 1})
	})
}

func TestStore_OwnersAndWorkersAreWhoTheyAre(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		owners, err := p.Owners(t.Context())
		if err != nil || len(owners) != 32 {
			t.Fatalf("%d owners, %v", len(owners), err)
		}
		for lane, o := range owners {
			mine := lane == testLane
			if o.Lane != lane || o.Alive() != mine || (o.Owner == p.f.Owner) != mine {
				t.Errorf("lane %d: %+v", lane, o)
			}
		}
		p.exec(t, `update {{relay_leases}} set lease_until = `+p.longAgo()+` where lane = $1`, testLane)
		if owners, err = p.Owners(t.Context()); err != nil || owners[testLane].Alive() || owners[testLane].Left > -time.Minute {
			t.Errorf("after its lease has ended: %+v, %v", owners[testLane], err)
		}

		for _, me := range []Identity{{Owner: "1", Name: "a", Ready: true}, {Owner: "2", Name: "b", Stopping: true}, {Owner: "3", Name: "c"}} {
			if _, err := p.Beat(t.Context(), me, nil, longTerm); err != nil {
				t.Fatal(err)
			}
		}
		minuteAgo, long := `clock_timestamp() - interval '1 minute'`, `clock_timestamp() - interval '2 hours'`
		if p.sqlite() {
			minuteAgo, long = sqliteNow+` - 60000000`, sqliteNow+` - 7200000000`
		}
		p.exec(t, `update {{relay_workers}} set seen_until = `+minuteAgo+` where owner = '2'`)
		p.exec(t, `update {{relay_workers}} set seen_until = `+long+` where owner = '3'`)
		workers, err := p.Workers(t.Context())
		if err != nil || len(workers) != 2 {
			t.Fatalf("workers %+v, %v", workers, err)
		}
		a, b := workers[0], workers[1]
		if a.Owner != "1" || a.Name != "a" || !a.Ready || a.Stopping || a.Left <= 0 || a.Up < 0 || a.Up > time.Hour {
			t.Errorf("%+v", a)
		}
		if b.Owner != "2" || b.Ready || !b.Stopping || b.Left > -59*time.Second || b.Left < -time.Hour {
			t.Errorf("%+v", b)
		}
	})
}
