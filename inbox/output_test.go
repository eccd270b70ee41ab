package inbox_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/outbox"
)

// routed is a message as the router hands it to a handler that was added with a
// publish topic: only the router can put the topic into the context.
func routed(t *testing.T, id, topic string) *message.Message {
	t.Helper()
	return routedTo(t, "any", id, topic)
}

func routedTo(t *testing.T, handler, id, topic string) *message.Message {
	t.Helper()
	msg := message.NewMessageWithContext(t.Context(), id, nil)
	seen := make(chan struct{})
	router := message.NewDefaultRouter(nil)
	router.AddHandler(handler, "orders", oneMessage{msg}, topic, refusingPublisher{t}, func(*message.Message) ([]*message.Message, error) {
		close(seen)
		return nil, nil
	})
	ended := make(chan error)
	go func() { ended <- router.Run(t.Context()) }()
	<-seen
	if err := errors.Join(router.Close(), <-ended); err != nil {
		t.Fatal(err)
	}
	copied := message.NewMessage(id, nil)
	copied.SetContext(msg.Context())
	return copied
}

// oneMessage is a subscriber that delivers one message.
type oneMessage struct{ msg *message.Message }

func (s oneMessage) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message, 1)
	out <- s.msg
	go func() {
		<-ctx.Done()
		close(out)
	}()
	return out, nil
}

func (s oneMessage) Close() error { return nil }

// refusingPublisher fails the test when the router publishes.
type refusingPublisher struct{ t *testing.T }

func (p refusingPublisher) Publish(topic string, msgs ...*message.Message) error {
	p.t.Errorf("the router published %d messages to %q", len(msgs), topic)
	return nil
}

func (p refusingPublisher) Close() error { return nil }

// returns makes a handler with an effect that returns messages with these ids.
func returns(ids ...string) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		var produced []*message.Message
		for _, id := range ids {
			produced = append(produced, message.NewMessage(id, []byte("x")))
		}
		return produced, addEffect(msg)
	}
}

func TestInbox_WritesReturnedMessagesToTheOutbox(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for range 2 {
			expectNoError(t, deliverMessage(t, in, routed(t, "a", "results"), returns("b", "c")))
		}
		p.expect(t, 1, 1, 2)
		if n := p.count(t, `select count(*) from {{outbox}} where topic = 'results' and message_id in ('b', 'c')`); n != 2 {
			t.Errorf("%d messages are as they were returned", n)
		}
	})
}

func TestInbox_ReturnedMessageThatCannotBePublishedRollsBack(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var bad *outbox.MessageError
		err := deliverMessage(t, p.inbox(t, nil), routed(t, "a", "results"), returns("b", ""))
		if !errors.As(err, &bad) || bad.Index != 1 {
			t.Errorf("got %v", err)
		}
		expectError(t, deliver(t, p.inbox(t, nil), "a", returns("b")), inbox.ErrNoTopic)
		noOutbox := p.inbox(t, func(cfg *inbox.Config) { cfg.Outbox = nil })
		expectError(t, deliverMessage(t, noOutbox, routed(t, "a", "results"), returns("b")), inbox.ErrNoOutbox)
		p.expect(t, 0, 0, 0)
		expectNoError(t, deliver(t, noOutbox, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}

func TestInbox_ContextPublisherWritesInTheTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		bus := p.box.ContextPublisher()
		failure := errors.New("after publishing")
		for _, want := range []error{failure, nil, nil} {
			err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				event := message.NewMessageWithContext(msg.Context(), "b", nil)
				return nil, errors.Join(addEffect(msg), bus.Publish("events", event), want)
			})
			expectError(t, err, want)
		}
		p.expect(t, 1, 1, 1)
	})
}

func TestInbox_WakesTheRelayAfterTheCommit(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		wake, stop := outboxqueue.Of(p.box).Listen()
		defer stop()
		expectNoError(t, deliverMessage(t, in, routed(t, "a", "results"), func(msg *message.Message) ([]*message.Message, error) {
			if len(wake) != 0 {
				t.Error("awake before the commit")
			}
			return returns("b")(msg)
		}))
		if len(wake) != 1 {
			t.Error("not awake")
		}
	})
}

// Nobody may wait any more for a handler that returns when its time is over: nothing looks at its messages.
func TestInbox_PublishesNothingThatIsReturnedTooLate(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var looked atomic.Int32
		box, err := outbox.New(p.pool(t), outbox.Config{Database: p.cfg, Key: func(*message.Message) string { looked.Add(1); return "" }})
		expectNoError(t, err)
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Outbox, cfg.Timeout = box, 200*time.Millisecond })
		for name, middleware := range map[string]message.HandlerMiddleware{"alone": in.Middleware, "group": in.GroupMiddleware} {
			var returned atomic.Bool
			h := middleware(func(m *message.Message) ([]*message.Message, error) {
				<-m.Context().Done()
				returned.Store(true)
				return []*message.Message{message.NewMessage("b", nil)}, nil
			})
			msg := routed(t, name, "results")
			eventually(t, "the handler runs in time", func() bool { // the time includes BEGIN
				_, err = h(msg)
				return returned.Load()
			})
			if err == nil || looked.Load() > 0 {
				t.Errorf("%s: %d messages were looked at, %v", name, looked.Load(), err)
			}
		}
		p.expect(t, 0, 0, 0)
	})
}
