package inbox

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// What several keys found missing is there for others, whose handlers take longer: those
// that were let through before the gate closed open it again. That the database is away is
// for a probe to find out.
func TestGate_OpensWhenOneThatCameBeforeFindsAllThere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		closes report
		opens  bool
	}{"something is missing": {reportMissing, true}, "the database is away": {reportDown, false}} {
		g := newGate(jitter)
		for _, key := range []string{"a", "b", "c"} {
			g.leave(0, c.closes, key)
			g.since = time.Now().Add(-agreementTime)
		}
		g.leave(0, c.closes, "c")
		if !g.closed {
			t.Fatalf("%s: it is open", name)
		}
		if turned, _ := g.leave(0, reportWorking, "d"); turned != c.opens || g.closed == c.opens {
			t.Errorf("%s: turned %v, closed %v", name, turned, g.closed)
		}
	}
}

// While the database is away, messages go on soon after it is back. What else handlers need is
// asked for less often.
func TestGate_ProbesTheDatabaseEverySecond(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		seen report
		most time.Duration
	}{"the database is away": {reportDown, time.Second}, "something is missing": {reportMissing, 5 * time.Second}} {
		var waits []time.Duration
		g := newGate(func(d time.Duration) time.Duration {
			waits = append(waits, d)
			return 0
		})
		g.closed, g.outage = true, c.seen == reportDown
		for range 20 {
			probe, err := g.enter(t.Context())
			if err != nil || probe == 0 {
				t.Fatalf("%s: probe %d, %v", name, probe, err)
			}
			g.leave(probe, c.seen, "a")
		}
		if first, last := waits[0], waits[len(waits)-1]; first != firstProbe || last != c.most {
			t.Errorf("%s: the first wait is %s, the last %s, want %s and %s", name, first, last, firstProbe, c.most)
		}
	}
}

// A probe whose handler does not return keeps the others waiting for as long as probes are apart.
// When it returns after all, it opens the gate if it has found everything there, and never closes
// it.
func TestGate_AProbeThatHangsLetsAnotherThrough(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		closes report
		most   time.Duration
	}{"the database is away": {reportDown, lastDatabaseProbe}, "something is missing": {reportMissing, lastProbe}} {
		synctest.Test(t, func(t *testing.T) {
			g := newGate(func(d time.Duration) time.Duration { return d })
			g.closed, g.outage = true, c.closes == reportDown
			enter := func(limit time.Duration) int {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				probe, _ := g.enter(ctx)
				return probe
			}
			hangs := enter(time.Second)
			if probe := enter(c.most / 2); probe != 0 {
				t.Errorf("%s: probe %d beside the first", name, probe)
			}
			second := enter(c.most)
			if second == 0 || second == hangs {
				t.Fatalf("%s: all wait for the first probe", name)
			}
			if g.leave(hangs, c.closes, "a"); !g.probing {
				t.Errorf("%s: an old probe speaks for the latest", name)
			}
			g.leave(second, c.closes, "b")
			third := enter(time.Minute)
			fourth := enter(time.Minute)
			if turned, _ := g.leave(third, reportWorking, "c"); !turned || g.closed {
				t.Errorf("%s: what an old probe has found there does not open the gate", name)
			}
			if g.leave(fourth, reportMissing, "d"); g.closed {
				t.Errorf("%s: one message that finds something missing closes the gate", name)
			}
		})
	}
}
