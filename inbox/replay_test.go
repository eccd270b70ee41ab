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
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// stutterer publishes everything twice, as one does who crashed before it noted that it
// had, and fails before that now and then.
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
	onEachPlace(t, func(t *testing.T, p *place) {
		store := p.letterStore(t)
		pubsub := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
		publisher := &stutterer{Publisher: pubsub}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = inbox.LettersOf(store)
			cfg.Fingerprint = func(msg *message.Message) []byte { return msg.Payload }
			cfg.Replays = &inbox.Replays{Letters: store, Publisher: publisher, Topic: func(l *dlq.Letter) string { return l.Topic }}
		})
		mail := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Consumer, cfg.DeadLetters = "mail", inbox.LettersOf(store)
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
			left, err := store.List(ctx, dlq.Filter{States: []dlq.State{dlq.Replayed}})
			expectNoError(t, err)
			return len(left) == 3
		}
		for begin := time.Now(); !closed(); time.Sleep(10 * time.Millisecond) {
			if time.Since(begin) > 20*time.Second {
				t.Fatal("not replayed in time")
			}
		}
		stop()
		if err := errors.Join(<-stopped, router.Close(), <-ended, pubsub.Close()); err != nil {
			t.Error(err)
		}
		var got []string
		seen.Range(func(k, _ any) bool { got = append(got, k.(string)); return true })
		slices.Sort(got)
		want := []string{
			"mail a: bad", "mail b: good", "stock a: bad", "stock b: good",
			fmt.Sprintf("stock letter-%d: other", ids["conflict"]), fmt.Sprintf("stock letter-%d: nameless", ids["no-message-id"]),
		}
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("effects %q, want %q", got, want)
		}
		p.expect(t, len(want), len(want), len(want))
		if n := p.count(t, `select count(*) from {{dead_letters}} where consumer = 'stock' and (acted_by <> 'ada' or version <> 3 or closed_at is null)`); n > 0 {
			t.Errorf("%d letters do not tell who ended them", n)
		}
	})
}

func TestNew_RefusesReplaysThatCannotBe(t *testing.T) {
	onEachPlace(t, func(t *testing.T, p *place) {
		_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, Replays: &inbox.Replays{}})
		for _, field := range []string{"inbox.Config.Replays.Letters", "inbox.Config.Replays.Publisher"} {
			if err == nil || !strings.Contains(err.Error(), field) {
				t.Errorf("%s is not reported: %v", field, err)
			}
		}
	})
}

// letterStore makes the table of dead letters.
func (p *place) letterStore(t *testing.T) *dlq.Store {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), p.db, p.cfg, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	store, err := dlq.New(p.pool(t), dlq.Config{Database: p.cfg})
	if err != nil {
		t.Fatal(err)
	}
	return store
}
