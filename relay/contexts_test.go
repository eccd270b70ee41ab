package relay

import (
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// A publish goes on for as long as its lane's lease is trusted, and no longer.
func TestPublishContexts_EndWithTheTrustInTheLease(t *testing.T) {
	t.Parallel()
	const trust = time.Hour
	for name, c := range map[string]struct {
		after time.Duration
		lose  func(*engine)
		ends  bool
	}{
		"the lease is trusted":       {trust, nil, false},
		"its time has run out":       {trust + 1, nil, true},
		"it was renewed before that": {trust + 1, func(e *engine) { e.trust(3, 1, e.lanes[3].trusted.Add(trust)) }, false},
		"the lane was dropped":       {0, func(e *engine) { e.drop(3) }, true},
	} {
		now := time.Now()
		e := newEngine(limits{})
		e.hold(3, relaystore.Taken{Epoch: 1}, now.Add(trust))
		contexts := newPublishContexts(t.Context(), 24*time.Hour)
		ctx, _ := contexts.of(e.lanes[3], now)
		if c.lose != nil {
			c.lose(e)
		}
		contexts.endLapsed(e, now.Add(c.after))
		if got := ctx.Err() != nil; got != c.ends {
			t.Errorf("%s: the context has ended: %t", name, got)
		}
		contexts.end()
	}
}
