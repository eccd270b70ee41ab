package inbox_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox/payload"
)

// By the database's clock, whatever unit statements count in.
func TestPurge_KeepsWhatIsYoungerThanTheRetention(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Retention = time.Hour })
		resolved, err := database.Resolve(p.db, p.cfg)
		expectNoError(t, err)
		for _, minutes := range []int{1, 59, 61} {
			id := fmt.Sprint(minutes)
			expectNoError(t, deliver(t, in, id, effect))
			ago := fmt.Sprintf(`received_at - interval '%d minutes'`, minutes)
			if resolved.Dialect == oncemill.SQLite {
				ago = fmt.Sprintf(`received_at - %d`, int64(minutes)*60_000_000)
			}
			p.exec(t, resolved.Expand(`update {{inbox}} set received_at = `+ago+` where message_id = $1`), id)
		}
		_, err = in.Purge(t.Context())
		expectNoError(t, err)
		if n := p.count(t, `select count(*) from {{inbox}} where message_id in ('1', '59')`); n != 2 || p.count(t, `select count(*) from {{inbox}}`) != 2 {
			t.Errorf("%d of the two that are younger are left", n)
		}
	})
}

// The record of failed attempts is kept as long: it says when a message is given up.
func TestPurge_KeepsFailuresThatAreYoungerThanTheRetention(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retention = time.Hour })
		resolved, err := database.Resolve(p.db, p.cfg)
		expectNoError(t, err)
		for _, minutes := range []int{1, 59, 61} {
			id := fmt.Sprint(minutes)
			expectError(t, deliver(t, in, id, func(*message.Message) ([]*message.Message, error) { return nil, errUndo }), errUndo)
			ago := fmt.Sprintf(`changed_at - interval '%d minutes'`, minutes)
			if resolved.Dialect == oncemill.SQLite {
				ago = fmt.Sprintf(`changed_at - %d`, int64(minutes)*60_000_000)
			}
			p.exec(t, resolved.Expand(`update {{inbox_failures}} set changed_at = `+ago+` where message_id = $1`), id)
		}
		_, err = in.Purge(t.Context())
		expectNoError(t, err)
		if n := p.count(t, `select count(*) from {{inbox_failures}} where message_id in ('1', '59')`); n != 2 || p.count(t, `select count(*) from {{inbox_failures}}`) != 2 {
			t.Errorf("%d of the two that are younger are left", n)
		}
	})
}

// Another message of the same id is a conflict wherever it meets the first: in a
// group before it, in the same one, alone.
func TestGroup_ConflictsAreNoDuplicates(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			// An empty fingerprint is one, too.
			cfg.Fingerprint = func(m *message.Message) []byte { return append([]byte{}, bytes.Trim(m.Payload, "\x00")...) }
			cfg.Group.Wait = 50 * time.Millisecond
		})
		group := in.GroupMiddleware(effect)
		batch := in.Batch(func(_ context.Context, msgs []*message.Message) error {
			for _, m := range msgs {
				if err := addEffect(m); err != nil {
					return err
				}
			}
			return nil
		})
		handlers := map[string]func(*message.Message) error{
			"group": func(m *message.Message) error { _, err := group(m); return err },
			"batch": batch,
		}
		for name, handle := range handlers {
			before := len(dead.all())
			for _, together := range []bool{true, false} {
				var all sync.WaitGroup
				for i := range 6 { // three ids, each of two messages
					msg := message.NewMessageWithContext(inbox.ContextWithDelivery(t.Context(), delivery{}), fmt.Sprint(name, together, i%3), []byte{byte(i / 3)})
					run := func() {
						for try := 0; handle(msg) != nil && try < 100; try++ { // being handled
							testserver.Pause(t.Context(), 10*time.Millisecond)
						}
					}
					if together {
						all.Go(run)
					} else {
						run()
					}
				}
				all.Wait()
			}
			conflicts := 0
			added := dead.all()
			added = added[:len(added)-before]
			for _, l := range added {
				if l.Reason == string(inbox.ReasonConflict) {
					conflicts++
				}
			}
			if conflicts != 6 || len(added) != 6 {
				t.Errorf("%s: %d conflicts of 6, %d letters", name, conflicts, len(added))
			}
		}
		p.expect(t, 12, 24, 0) // each letter has an id of its own
		if n := p.count(t, `select count(*) from {{inbox}} where fingerprint is not null`); n != 12 {
			t.Errorf("%d fingerprints are kept", n)
		}
	})
}

// crowd is a store that looks how many are served at once.
type crowd struct {
	mu        sync.Mutex
	all       map[string][]byte
	now, most atomic.Int32
}

func (c *crowd) Put(_ context.Context, name string, body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[name] = bytes.Clone(body)
	return nil
}

func (c *crowd) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	now := c.now.Add(1)
	for most := c.most.Load(); now > most && !c.most.CompareAndSwap(most, now); most = c.most.Load() {
	}
	defer c.now.Add(-1)
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	testserver.Poll(limited, func() bool { return c.most.Load() >= 2 }) // the next one comes
	testserver.Pause(ctx, 5*time.Millisecond)
	c.mu.Lock()
	defer c.mu.Unlock()
	return io.NopCloser(bytes.NewReader(c.all[name])), nil
}

func TestInbox_FewPayloadsAreDecodedAtOnce(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	store := &crowd{all: map[string][]byte{}}
	codec := newCodec(t, func(cfg *payload.Config) { cfg.Store, cfg.StoreFrom, cfg.CompressFrom = store, 1, 1 })
	in := p.inbox(t, func(cfg *inbox.Config) { cfg.Payload = codec })
	var all sync.WaitGroup
	for i := range 40 {
		msg := encoded(t, codec, "orders", fmt.Sprint(i), string(make([]byte, 1<<20)))
		all.Go(func() {
			_, err := in.Middleware(effect)(msg)
			expectNoError(t, err)
		})
	}
	all.Wait()
	if n := store.most.Load(); n > 4 || n < 2 {
		t.Errorf("%d payloads were decoded at once", n)
	}
	p.expect(t, 40, 40, 0)
}
