package inbox

import (
	"testing"
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
			g.leave(false, c.closes, key)
			g.since = time.Now().Add(-agreementTime)
		}
		g.leave(false, c.closes, "c")
		if !g.closed {
			t.Fatalf("%s: it is open", name)
		}
		if turned, _ := g.leave(false, reportWorking, "d"); turned != c.opens || g.closed == c.opens {
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
		for range 20 {
			g.leave(true, c.seen, "a")
		}
		if first, last := waits[0], waits[len(waits)-1]; first != firstProbe || last != c.most {
			t.Errorf("%s: the first wait is %s, the last %s, want %s and %s", name, first, last, firstProbe, c.most)
		}
	}
}
