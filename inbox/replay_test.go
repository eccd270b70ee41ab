package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
)

// stutterer publishes everything twice, as two processes do, and fails before that.
type stutterer struct {
	message.Publisher
	refused sync.Map
}

func (p *stutterer) Publish(topic string, msgs ...*message.Message) error {
	if _, before := p.refused.LoadOrStore(msgs[0].UUID, true); !before {
		return errors.New("the broker is away")
	}
	return errors.Join(p.Publisher.Publish(topic, msgs...), p.Publisher.Publish(topic, msgs[0].Copy()))
}

// What is replayed comes to its consumer alone, and has one effect: a message that
// failed, one that had no id, and one that had another's.
func TestReplays_GiveMessagesBackToTheirConsumer(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		pubsub := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
		publisher := &stutterer{Publisher: pubsub}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Fingerprint = func(msg *message.Message) []byte { return msg.Payload }
			cfg.Replays = &inbox.Replays{Publisher: publisher, Topic: func(l *dlq.Letter) string { return l.Topic }}
		})
		mail := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Consumer, cfg.DeadLetters = "mail", store
		})
		var mended atomic.Bool
		var seen sync.Map
		handle := func(consumer string) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				if consumer == "stock" && string(msg.Payload) == "bad" && !mended.Load() {
					return nil, inbox.Permanent(errors.New("no such article"))
				}
				seen.Store(fmt.Sprint(consumer, " ", msg.UUID, ": ", string(msg.Payload)), true)
				tx, err := handlerTx(msg.Context())
				if err != nil {
					return nil, err
				}
				if _, err := tx.ExecContext(msg.Context(), `insert into effects (message_id, note) values ($1, $2)`, msg.UUID, consumer); err != nil {
					return nil, err
				}
				onward := message.NewMessage(consumer+" "+msg.UUID, nil)
				maps.Copy(onward.Metadata, msg.Metadata)
				return []*message.Message{onward}, nil
			}
		}
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddHandler("stock", "orders", pubsub, "onward", refusingPublisher{t}, handle("stock")).AddMiddleware(in.Middleware)
		router.AddHandler("mail", "orders", pubsub, "onward", refusingPublisher{t}, handle("mail")).AddMiddleware(mail.Middleware)
		ended := make(chan error)
		go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
		<-router.Running()
		for _, m := range []struct{ id, payload string }{{"a", "bad"}, {"b", "good"}, {"b", "other"}, {"", "nameless"}} {
			msg := message.NewMessage(m.id, []byte(m.payload))
			msg.Metadata.Set("trace", "1")
			expectNoError(t, pubsub.Publish("orders", msg))
		}
		mended.Store(true)
		ctx := t.Context()
		if n, err := in.Replay(ctx); n != 0 || err != nil {
			t.Errorf("%d replayed that nobody asked for, %v", n, err)
		}
		ids := map[string]int64{}
		var all []int64
		letters, err := store.List(ctx, dlq.Filter{Consumer: "stock"})
		expectNoError(t, err)
		for _, l := range letters {
			ids[l.Reason] = l.ID
			all = append(all, l.ID)
		}
		accepted, err := store.Replay(ctx, all, dlq.Act{By: "ada"})
		if err != nil || len(accepted) != 3 {
			t.Fatalf("%d letters of %d accepted, %v", len(accepted), len(all), err)
		}
		if n, err := in.Replay(ctx); n != 0 || err == nil || strings.Count(err.Error(), "the broker is away") != 3 {
			t.Errorf("%d replayed while the broker is away, %v", n, err)
		}
		running, stop := context.WithCancel(ctx)
		stopped := make(chan error)
		go func() { stopped <- in.Run(running) }()
		closed := func() bool {
			left, err := store.List(ctx, dlq.Filter{States: []dlq.State{dlq.StateReplayed}})
			expectNoError(t, err)
			return len(left) == 3
		}
		eventually(t, "all are replayed", closed)
		stop()
		if err := errors.Join(<-stopped, router.Close(), <-ended, pubsub.Close()); err != nil {
			t.Error(err)
		}
		var got []string
		seen.Range(func(k, _ any) bool { got = append(got, k.(string)); return true })
		slices.Sort(got)
		want := []string{
			"mail a: bad", "mail b: good", "stock a: bad", "stock b: good",
			"stock b: other", fmt.Sprintf("stock letter-%d: nameless", ids["no-message-id"]),
		}
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("effects %q, want %q", got, want)
		}
		p.expect(t, len(want), len(want)+1, len(want)) // and that of the letter of a conflict
		if n := p.count(t, `select count(*) from {{dead_letters}} where consumer = 'stock' and (acted_by <> 'ada' or version <> 3 or closed_at is null)`); n > 0 {
			t.Errorf("%d letters do not tell who ended them", n)
		}
	})
}

func TestNew_RefusesReplaysThatCannotBe(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, Replays: &inbox.Replays{}})
		for _, field := range []string{"inbox.Config.DeadLetters", "inbox.Config.Replays.Publisher"} {
			if err == nil || !strings.Contains(err.Error(), field) {
				t.Errorf("%s is not reported: %v", field, err)
			}
		}
	})
}

// letterStore makes the table of dead letters.
func (p *testDB) letterStore(t *testing.T) *dlq.Store {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	store, err := dlq.New(p.pool(t), dlq.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// recorder keeps what is published.
type recorder struct {
	mu     sync.Mutex
	topics []string
	msgs   []*message.Message
	first  func()
}

func (r *recorder) Publish(topic string, msgs ...*message.Message) error {
	if f := r.first; f != nil {
		r.first = nil
		f()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range msgs {
		r.topics, r.msgs = append(r.topics, topic), append(r.msgs, m.Copy())
	}
	return nil
}
func (r *recorder) Close() error { return nil }

func toQueue(*dlq.Letter) string { return "queue" }

func replayAll(t *testing.T, store *dlq.Store, consumer string) (ids []int64) {
	t.Helper()
	list, err := store.List(t.Context(), dlq.Filter{Consumer: consumer, States: []dlq.State{dlq.StateDead}, Limit: 1000})
	expectNoError(t, err)
	for _, l := range list {
		ids = append(ids, l.ID)
	}
	_, err = store.Replay(t.Context(), ids, dlq.Act{By: "ada"})
	expectNoError(t, err)
	return ids
}

func bad(*message.Message) ([]*message.Message, error) {
	return nil, inbox.Permanent(errors.New("not mended"))
}

// Copies of a replay make one letter at most, whoever publishes them.
func TestReplays_CopiesOfOneThatFailsMakeOneLetter(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		process := func() *inbox.Inbox {
			return p.inbox(t, func(cfg *inbox.Config) {
				cfg.DeadLetters = store
				cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
			})
		}
		a, b := process(), process()
		const n = 10
		for i := range n {
			expectNoError(t, deliverMessage(t, a, message.NewMessage(fmt.Sprint("m", i), nil), bad))
		}
		for round := 1; round <= 3; round++ {
			replayAll(t, store, "stock")
			rec.topics, rec.msgs = nil, nil
			rec.first = func() { // while a publishes its first one, b does its step
				if _, err := b.Replay(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if _, err := a.Replay(t.Context()); err != nil {
				t.Error(err)
			}
			for _, m := range rec.msgs {
				m.SetContext(context.WithoutCancel(t.Context()))
				expectNoError(t, deliverMessage(t, a, m, bad))
			}
			dead, err := store.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead}, Limit: 1000})
			expectNoError(t, err)
			if len(dead) != n {
				t.Errorf("round %d: %d messages were published %d times, and have %d open letters", round, n, len(rec.msgs), len(dead))
			}
		}
	})
}

// A copy of a replay that comes late does not undo what was decided since.
func TestReplays_ALateCopyHasNoEffect(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		replayAll(t, store, "stock")
		if _, err := in.Replay(t.Context()); err != nil {
			t.Fatal(err)
		}
		again := rec.msgs[0].Copy() // published twice
		expectNoError(t, deliverMessage(t, in, rec.msgs[0], bad))
		dead, err := store.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead}})
		expectNoError(t, err)
		expectNoError(t, store.Discard(t.Context(), dead[0].ID, dlq.Act{By: "ada", Reason: "done by hand"}))
		ran := false
		expectNoError(t, deliverMessage(t, in, again, func(*message.Message) ([]*message.Message, error) { ran = true; return nil, nil }))
		if ran {
			t.Error("a copy of the replay of letter 1 had an effect after letter 2 was discarded")
		}
	})
}

// What no router has seen has no topic, unless the subscriber tells.
func TestReplays_NeedATopic(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec}
		})
		// As rabbitmq.Config.Malformed calls it, with the subscriber's context.
		expectNoError(t, in.Refuse(t.Context(), message.NewMessage("a", []byte("x")), errors.New("no such encoding")))
		replayAll(t, store, "stock")
		n, err := in.Replay(t.Context())
		if n != 0 || err == nil || len(rec.msgs) > 0 {
			t.Errorf("%d replayed, to topics %q, %v", n, rec.topics, err)
		}
	})
}

// An id of Config.ID is not the UUID, which comes back as it was.
func TestReplays_KeepTheUUIDBesideConfigID(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.ID = func(m *message.Message) string { return m.Metadata.Get("event_id") }
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("uuid", nil), bad)) // no event_id
		withID := message.NewMessage("uuid 2", nil)
		withID.Metadata.Set("event_id", "e2")
		expectNoError(t, deliverMessage(t, in, withID, bad))
		replayAll(t, store, "stock")
		if _, err := in.Replay(t.Context()); err != nil {
			t.Fatal(err)
		}
		ran := 0
		for _, m := range rec.msgs {
			expectNoError(t, deliverMessage(t, in, m, func(m *message.Message) ([]*message.Message, error) {
				if m.Metadata.Get("event_id") == "e2" && m.UUID != "uuid 2" {
					t.Errorf("the UUID %q is %q now", "uuid 2", m.UUID)
				}
				ran++
				return nil, nil
			}))
		}
		if ran != 2 {
			t.Errorf("%d of 2 had an effect", ran)
		}
	})
}

// The order of a key that is enforced is not that of its replays.
func TestReplays_PassTheSequence(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Sequence = func(m *message.Message) (n int64, ok bool) {
				_, err := fmt.Sscan(m.UUID, &n)
				return n, err == nil
			}
			cfg.GapWait = time.Millisecond
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		var ran []string
		good := func(m *message.Message) ([]*message.Message, error) { ran = append(ran, m.UUID); return nil, nil }
		nth := func(n int) *message.Message {
			m := message.NewMessage(fmt.Sprint(n), nil)
			m.Metadata.Set("oncemill_key", "k")
			return m
		}
		expectNoError(t, deliverMessage(t, in, nth(1), good))
		expectNoError(t, deliverMessage(t, in, nth(2), bad))
		expectError(t, deliverMessage(t, in, nth(3), good), inbox.ErrGap)
		eventually(t, "it is not waited for any longer", func() bool { return deliverMessage(t, in, nth(3), good) == nil })
		replayAll(t, store, "stock")
		if _, err := in.Replay(t.Context()); err != nil {
			t.Fatal(err)
		}
		expectNoError(t, deliverMessage(t, in, rec.msgs[0], good))
		left, err := store.List(t.Context(), dlq.Filter{})
		expectNoError(t, err)
		if !slices.Equal(ran, []string{"1", "3", "2"}) || left[0].State != dlq.StateReplayed {
			t.Errorf("handled %q; the letter is %s", ran, left[0].State)
		}
		expectNoError(t, deliverMessage(t, in, nth(4), good)) // the sequence is where it was
	})
}

func TestReplays_AreOfTheirConsumerAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		with := func(consumer string) *inbox.Inbox {
			return p.inbox(t, func(cfg *inbox.Config) {
				cfg.Consumer = consumer
				cfg.DeadLetters = store
				cfg.Replays = &inbox.Replays{Publisher: rec, Topic: func(*dlq.Letter) string { return "queue of " + consumer }}
			})
		}
		stock, eu := with("stock"), with("stock/eu")
		expectNoError(t, deliverMessage(t, eu, message.NewMessage("a", nil), bad))
		replayAll(t, store, "stock/eu")
		if n, err := stock.Replay(t.Context()); n != 0 || err != nil {
			t.Errorf("stock has replayed %d letters of stock/eu, to %q, %v", n, rec.topics, err)
		}
		if n, err := eu.Replay(t.Context()); n != 1 || err != nil {
			t.Errorf("stock/eu has replayed %d, %v", n, err)
		}
	})
}

// The letters of a handler are replayed though it has had no message yet.
func TestReplays_AreOfHandlersToo(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		with := func(consumer string) *inbox.Inbox {
			return p.inbox(t, func(cfg *inbox.Config) {
				cfg.Consumer, cfg.DeadLetters = consumer, store
				cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
			})
		}
		// As a process before this one has left it.
		expectNoError(t, deliverMessage(t, with("stock/reserve"), message.NewMessage("a", nil), bad))
		replayAll(t, store, "stock/reserve")
		in := with("stock")
		in.PerHandler(bad)
		if n, err := in.Replay(t.Context()); n != 1 || err != nil {
			t.Errorf("%d replayed, %v", n, err)
		}
		for range 2 { // what it has published is remembered for more than one step
			if n, err := in.Replay(t.Context()); n != 0 || err != nil {
				t.Errorf("%d replayed again at once, %v", n, err)
			}
		}
	})
}

// A longer name is that of a handler only behind a slash.
func TestReplays_AreOfNoConsumerWithALikeName(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		with := func(consumer string) *inbox.Inbox {
			return p.inbox(t, func(cfg *inbox.Config) {
				cfg.Consumer, cfg.DeadLetters = consumer, store
				cfg.Replays = &inbox.Replays{Publisher: &recorder{}, Topic: toQueue}
			})
		}
		expectNoError(t, deliverMessage(t, with("stockroom"), message.NewMessage("a", nil), bad))
		replayAll(t, store, "stockroom")
		in := with("stock")
		in.PerHandler(bad)
		if n, err := in.Replay(t.Context()); n != 0 || err != nil {
			t.Errorf("stock has replayed %d letters of stockroom, %v", n, err)
		}
	})
}

// A replay ends though the message is dead no more: somebody has mended that by hand.
func TestReplays_EndWhereNothingIsDead(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		rec := &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Fingerprint = func(m *message.Message) []byte { return m.Payload }
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		for id, payload := range map[string]string{"same": "x", "other": "y"} {
			expectNoError(t, deliverMessage(t, in, message.NewMessage(id, []byte("x")), bad))
			resolved, err := database.Resolve(p.db, p.cfg)
			expectNoError(t, err)
			p.exec(t, resolved.Expand(`delete from {{inbox}} where message_id = '`+id+`'`))
			expectNoError(t, deliverMessage(t, in, message.NewMessage(id, []byte(payload)), effect))
		}
		replayAll(t, store, "stock")
		if n, err := in.Replay(t.Context()); n != 2 || err != nil {
			t.Fatalf("%d published, %v", n, err)
		}
		for _, m := range rec.msgs {
			expectNoError(t, deliverMessage(t, in, m, effect))
		}
		states := map[string]int{}
		letters, err := store.List(t.Context(), dlq.Filter{})
		expectNoError(t, err)
		for _, l := range letters {
			states[fmt.Sprint(l.State, " ", l.Reason, " ", l.MessageID)]++
		}
		want := map[string]int{"replayed permanent same": 1, "replayed permanent other": 1, "dead conflict other": 1}
		if !maps.Equal(states, want) {
			t.Errorf("letters %v, want %v", states, want)
		}
		p.expect(t, 2, 2, 0)
	})
}
