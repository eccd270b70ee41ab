package relay_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// A readiness probe sees whether the relay runs, and what it cannot do.
func TestRelay_IsReadyWhileItCanWork(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	proxy, db := p.behindProxy(t)
	s := &sink{name: "w", wire: &wire{}}
	r, err := relay.New(p.boxOn(t, db, outbox.NoHistory), s, relay.Config{Lease: silenceLease, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Ready(); !errors.Is(err, relay.ErrNotRunning) {
		t.Errorf("Ready before Run: %v", err)
	}
	ready := func() bool { return r.Ready() == nil }
	lacks := func(what string) func() bool {
		return func() bool {
			err := r.Ready()
			return err != nil && strings.Contains(err.Error(), what)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	eventually(t, "it is ready", ready)

	s.away.Store(true)
	eventually(t, "it lacks its broker", lacks("the sink does not reach its broker"))
	s.away.Store(false)
	eventually(t, "it is ready with its broker", ready)

	proxy.Silence(silencing{parts: []string{"_read\"("}}.matcher(p), math.MaxInt)
	commit(t, p.box(t), spread(32, 1)...) // something to read
	// On a busy machine it may lack other answers for a moment.
	eventually(t, "it lacks the answers to its reads", func() bool {
		return lacks("no answer from the database")() && lacks("reading the outbox")()
	})
	proxy.Resume()
	eventually(t, "it is ready with its database", ready)

	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := r.Ready(); !errors.Is(err, relay.ErrNotRunning) {
		t.Errorf("Ready after Run: %v", err)
	}
}
