package relaystore

import (
	"testing"
	"time"
)

func TestStore_WaitingCountsUpToALimit(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		expect := func(what string, most int, want Waiting) {
			t.Helper()
			got, err := p.Waiting(t.Context(), most)
			if got.Oldest < 0 || got.Oldest > time.Hour || (got.Oldest > 0) != (want.Retrying > 0) {
				t.Errorf("%s: the oldest is %v old", what, got.Oldest)
			}
			got.Oldest = 0
			if err != nil || got != want {
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

// What was set aside uses up no attempt, so it may wait without end: its age is that of the oldest,
// behind however many others.
func TestStore_WaitingTellsTheAgeOfWhatWasSetAside(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		rows := p.publish(t, loose(3)...)
		aside := failing(rows[0], FateRetry)
		aside.Attempt, aside.Uncharged = 0, true
		p.mustFail(t, []Failure{aside, failing(rows[1], FateRetry)})
		old := `clock_timestamp() - interval '2 hours'`
		if p.sqlite() {
			old = sqliteNow + ` - 7200000000`
		}
		p.exec(t, `update {{parked}} set created_at = `+old+` where attempts > 0`)
		got, err := p.Waiting(t.Context(), 10)
		if err != nil || got.SetAside != 1 || got.OldestSetAside <= 0 || got.OldestSetAside > time.Minute || got.Oldest < 2*time.Hour || got.Oldest > 3*time.Hour {
			t.Errorf("%+v, %v", got, err)
		}
		p.exec(t, `update {{parked}} set created_at = `+old+` where attempts = 0`)
		if got, err = p.Waiting(t.Context(), 1); err != nil || got.OldestSetAside < 2*time.Hour || got.OldestSetAside > 3*time.Hour {
			t.Errorf("counting ends at one: %+v, %v", got, err)
		}
	})
}

// A key has one message that is tried again. The others of the key are counted behind it.
func TestStore_RetryingReturnsHeadsWithTheirErrors(t *testing.T) {
	eachStore(t, func(t *testing.T, p *fixture) {
		first, second := p.publish(t, named(laneKey(1), 3)...), p.publish(t, named(laneKey(2), 1)...)
		p.mustFail(t, []Failure{failing(first[0], FateRetry), failing(second[0], FateRetry)}, first[1:]...)
		for what, c := range map[string]struct {
			filter RetryingFilter
			want   int
		}{
			"all":           {RetryingFilter{Limit: 10}, 2},
			"up to one":     {RetryingFilter{Limit: 1}, 1},
			"a topic":       {RetryingFilter{Topic: first[0].Topic, Limit: 10}, 2},
			"another topic": {RetryingFilter{Topic: "other", Limit: 10}, 0},
			"a key":         {RetryingFilter{Key: laneKey(1), Lane: testLane, Limit: 10}, 1},
			"another key":   {RetryingFilter{Key: "other", Lane: testLane, Limit: 10}, 0},
		} {
			got, err := p.Retrying(t.Context(), c.filter)
			if err != nil || len(got) != c.want {
				t.Errorf("%s: %d messages, want %d, %v", what, len(got), c.want, err)
			}
		}
		got, err := p.Retrying(t.Context(), RetryingFilter{Key: laneKey(1), Lane: testLane, Limit: 10})
		if err != nil || len(got) != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
		if r := got[0]; r.Behind != 2 || r.Attempts != 1 || r.ID != first[0].ID || len(r.Errors) < 10 || r.NextAt.IsZero() || time.Since(r.CreatedAt) > time.Hour {
			t.Errorf("%+v", r)
		}
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

		for _, me := range []Identity{{Owner: "1", Name: "a", Ready: true, Host: "h", Version: "v1"}, {Owner: "2", Name: "b", Stopping: true, Problem: "no broker"}, {Owner: "3", Name: "c"}} {
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
		if a.Host != "h" || a.Version != "v1" || a.Problem != "" || b.Problem != "no broker" || a.Heartbeat < 0 || a.Heartbeat > time.Minute {
			t.Errorf("%+v, %+v", a, b)
		}
		if a.Owner != "1" || a.Name != "a" || !a.Ready || a.Stopping || a.Left <= 0 || a.Up < 0 || a.Up > time.Hour {
			t.Errorf("%+v", a)
		}
		if b.Owner != "2" || b.Ready || !b.Stopping || b.Left > -59*time.Second || b.Left < -time.Hour {
			t.Errorf("%+v", b)
		}
	})
}
