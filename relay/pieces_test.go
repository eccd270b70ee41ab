package relay_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// A message takes longer on its way from the database than a call may, for both workers.
// It comes in pieces; the others of its worker wait little, and nobody is unfit.
func TestRelay_DeliversALargeMessageOverASlowWay(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	for name, failures := range map[string]int32{"at once": 0, "after a failure": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			deliverLarge(t, failures)
		})
	}
}

// deliverLarge has a message of 12 MiB delivered after attempts that fail; then it comes from
// where it waits.
func deliverLarge(t *testing.T, failures int32) {
	t.Helper()
	p := onPostgres(t)
	f := newVariety(p.beatsOf(t, "b"))
	var came atomic.Bool
	var attempts atomic.Int32
	payload := make([]byte, 12<<20)
	if _, err := rand.Read(payload); err != nil {
		t.Fatal(err)
	}
	handle := func(ctx context.Context, m *relay.Message) error {
		if m.MessageID == "huge" {
			if !bytes.Equal(m.Payload, payload) {
				t.Errorf("%d bytes came, not those of the message", len(m.Payload))
			}
			if attempts.Add(1) <= failures {
				return relay.Refused(errors.New("not yet"))
			}
			came.Store(true)
		}
		return f.handle(ctx, m)
	}
	log := &bytes.Buffer{}
	cfg := relay.Config{Lease: silenceLease, Retry: quickly, Logger: slog.New(slog.NewTextHandler(log, nil))}
	for _, name := range []string{"a", "b"} {
		proxy, db := p.behindProxy(t)
		proxy.Slow(3 << 20) // twice as many bytes as the payload has are on their way, with lib/pq
		start(t, p.boxOn(t, db, outbox.NoHistory), &sink{name: name, wire: f.wire, handle: handle}, cfg)
	}
	p.awaitShared(t)
	producer, err := outbox.New(p.db, outbox.Config{Database: p.cfg, History: outbox.NoHistory, Logger: quiet, MaxPayload: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	stop := f.start(t, producer)
	begin := f.clock.Load()
	huge := message.NewMessage("huge", payload)
	outbox.SetKey(huge, "its own")
	commit(t, producer, huge)
	f.add([]*message.Message{huge})
	until(t, "the message comes", func() bool { return came.Load() || f.clock.Load() > begin+100*15 }, f.clock.Load)
	if !came.Load() {
		t.Fatal("the message has not come in a hundred leases")
	}
	took := f.clock.Load() - begin
	stop()
	f.check(t, p)
	sameLane := map[string]bool{} // they wait for it
	for _, m := range f.expected {
		sameLane[m.UUID] = outbox.Lane(m.Metadata.Get(outbox.KeyMetadata), m.UUID) == outbox.Lane("its own", "")
	}
	gap, which := f.longest(begin, sameLane)
	t.Logf("the message took %.1f leases; the longest delay of one of another lane was %.1f, of %s; lanes %v", leases(took), leases(gap), which, p.shares(t))
	if gap > 2*15 || strings.Contains(log.String(), "unfit") {
		t.Errorf("message %s took %.1f leases, or a worker was unfit:\n%s", which, leases(gap), tail(log.String(), 3000))
	}
}
