package relay_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// wire is what has arrived at the broker, from any number of sinks.
type wire struct {
	mu   sync.Mutex
	sent []arrival
	ids  map[string]bool // of the first of sent, as many as were counted
	seen int             // so many
}

type arrival struct {
	by      string // the sink's name
	lane    int
	id      int64
	message string
	key     string
	at      time.Time
}

func (w *wire) record(by string, m *relay.Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = append(w.sent, arrival{by: by, lane: m.Lane, id: m.ID, message: m.MessageID, key: m.Key, at: time.Now()})
}

func (w *wire) all() []arrival {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.sent)
}

func (w *wire) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.sent)
}

// by counts what each sink has sent.
func (w *wire) by() map[string]int {
	n := map[string]int{}
	for _, a := range w.all() {
		n[a.by]++
	}
	return n
}

// distinct counts the messages that have arrived at least once. Tests ask over and over, so
// it goes on where it was.
func (w *wire) distinct() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ids == nil {
		w.ids = map[string]bool{}
	}
	for ; w.seen < len(w.sent); w.seen++ {
		w.ids[w.sent[w.seen].message] = true
	}
	return len(w.ids)
}

func (w *wire) await(t testing.TB, n int) {
	t.Helper()
	eventually(t, fmt.Sprint(n, " messages"), func() bool { return w.distinct() >= n })
}

// check compares what arrived with what was committed, given in the order in
// which it was: nothing lost, nothing invented, first occurrences in order for
// each key, and no more repeats than a fault explains.
func (w *wire) check(t testing.TB, committed []*message.Message, repeats int) {
	t.Helper()
	want := map[string][]string{}
	position := map[string]bool{}
	for _, m := range committed {
		key := m.Metadata.Get(outbox.KeyMetadata)
		want[key] = append(want[key], m.UUID)
		position[m.UUID] = true
	}
	got := map[string][]string{}
	seen := map[string]int{}
	for _, a := range w.all() {
		if !position[a.message] {
			t.Errorf("%s arrived and was not committed", a.message)
		}
		if seen[a.message]++; seen[a.message] == 1 {
			got[a.key] = append(got[a.key], a.message)
		}
	}
	for key, messages := range want {
		if lost := len(messages) - len(got[key]); lost != 0 {
			t.Errorf("key %q: %d lost", key, lost)
		} else if key != "" && !slices.Equal(messages, got[key]) {
			t.Errorf("key %q: reordered: %v", key, got[key])
		}
	}
	maps.DeleteFunc(seen, func(_ string, n int) bool { return n == 1 })
	if len(seen) > repeats {
		t.Errorf("%d messages repeated, at most %d expected: %v", len(seen), repeats, seen)
	}
}

// sink records what it is handed on a wire.
type sink struct {
	name string
	wire *wire

	// handle decides what becomes of a message, in a goroutine of its own. A
	// message that it returns nil for has arrived. Without it, all arrive and
	// are confirmed at once.
	handle func(ctx context.Context, m *relay.Message) error

	away  atomic.Bool // not Ready
	group sync.WaitGroup
}

func (s *sink) Run(ctx context.Context) error {
	<-ctx.Done()
	s.group.Wait()
	return nil
}

func (s *sink) Ready() bool { return !s.away.Load() }

func (s *sink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	for _, m := range msgs {
		if s.handle == nil {
			s.wire.record(s.name, m)
			done(m, nil)
			continue
		}
		s.group.Go(func() {
			err := s.handle(ctx, m)
			if err == nil {
				s.wire.record(s.name, m)
			}
			done(m, err)
		})
	}
}

// slow confirms after a while.
func slow(d time.Duration) func(context.Context, *relay.Message) error {
	return func(ctx context.Context, _ *relay.Message) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return relay.Unavailable(ctx.Err())
		}
	}
}

// running is a relay at work.
type running struct {
	*telemetry
	stop func() // and wait
}

// start runs a relay until the test ends or stop is called. It must then return
// without an error.
func start(t testing.TB, box *outbox.Outbox, s relay.Sink, cfg relay.Config) running {
	t.Helper()
	r := running{telemetry: newTelemetry()}
	cfg.MeterProvider = r.provider
	if named, ok := s.(*sink); ok {
		cfg.Name = named.name
	}
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	made, err := relay.New(box, s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.stop = testserver.Run(t, made.Run)
	return r
}

var (
	// short is a configuration in which takeovers come soon.
	short = relay.Config{Lease: time.Second}

	// unhurried is one for a single worker that never has to hurry.
	unhurried = relay.Config{Lease: 6 * time.Second}
)

// unhurried is a configuration in which a busy machine causes no takeover.
// SQLite, which has one writer at a time, keeps workers waiting for longer.
func (p testDB) unhurried() relay.Config {
	if p.postgres() {
		return relay.Config{Lease: 6 * time.Second}
	}
	return relay.Config{Lease: 15 * time.Second}
}
