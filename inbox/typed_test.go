package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/relay"
)

type order struct {
	ID   string
	Item string
}

func TestHandle_TakesAValueAndTheTransaction(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, nil)
		handler := inbox.Handle(inbox.JSON, func(ctx context.Context, tx oncemill.Tx, o order) ([]*message.Message, error) {
			if msg, ok := inbox.MessageFromContext(ctx); !ok || msg.UUID != "a" || msg.Metadata.Get("tenant") != "t" {
				t.Errorf("the message is %+v", msg)
			}
			_, err := tx.ExecContext(ctx, `insert into effects (message_id, note) values ($1, $2)`, o.ID, o.Item)
			return []*message.Message{message.NewMessage("out", nil)}, err
		})
		msg := routed(t, "a", "results")
		msg.Payload = []byte(`{"ID":"1","Item":"pen"}`)
		msg.Metadata.Set("tenant", "t")
		expectNoError(t, deliverMessage(t, in, msg, handler))
		p.expect(t, 1, 1, 1)
		if n := p.count(t, `select count(*) from effects where message_id = '1' and note = 'pen'`); n != 1 {
			t.Error("the effect is another")
		}
		garbage := routed(t, "b", "results")
		garbage.Payload = []byte(`{`)
		expectNoError(t, deliverMessage(t, in, garbage, handler))
		if letter := dead.last(); letter.Reason != string(inbox.ReasonPermanent) || !strings.Contains(letter.Error, "decode payload as inbox_test.order") {
			t.Errorf("letter %+v", letter)
		}
		_, err := handler(msg)
		expectError(t, err, inbox.ErrNoInbox)
		if _, ok := inbox.MessageFromContext(msg.Context()); ok {
			t.Error("there is a message where no inbox is")
		}
		_, err = inbox.Decode[int](inbox.JSON, msg)
		var bad *inbox.PayloadError
		if !errors.As(err, &bad) || bad.Type != "int" {
			t.Errorf("got %v", err)
		}
	})
}

func TestAttemptFromContext_CountsDeliveriesAndTries(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, nil) // 3 deliveries of 2 tries
		var seen []inbox.Attempt
		see := func(fail error) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				attempt, ok := inbox.AttemptFromContext(msg.Context())
				if !ok {
					t.Error("the handler has no attempt")
				}
				seen = append(seen, attempt)
				return nil, fail
			}
		}
		expectError(t, deliver(t, in, "a", see(errUndo)), errUndo)
		expectError(t, deliverMessage(t, in, from(t, "a", delivery{nacks: 1}), see(inbox.Unavailable(errUndo))), errUndo)
		expectError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), see(errUndo)), errUndo)
		expectNoError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), see(errUndo)))
		want := []inbox.Attempt{
			{Delivery: 1, Try: 1},
			{Delivery: 1, Try: 2},
			{Delivery: 2, Try: 1}, // an outage does not count
			{Delivery: 2, Try: 1},
			{Delivery: 2, Try: 2},
			{Delivery: 3, Try: 1},
			{Delivery: 3, Try: 2, Last: true},
		}
		if !slices.Equal(seen, want) {
			t.Errorf("got %+v, want %+v", seen, want)
		}
		if n := len(dead.all()); n != 1 {
			t.Errorf("%d dead letters", n)
		}
		if _, ok := inbox.AttemptFromContext(t.Context()); ok {
			t.Error("there is an attempt where no inbox is")
		}
	})
}

type placed struct{ ID string }

type pack struct{ ID string }

type packed struct{ ID string }

// Two handlers of one event and one of a command, with processors and buses of
// Watermill, each hop through the outbox of its transaction. Everything is
// delivered twice, and every handler fails at first.
func TestInbox_CQRSOverSeveralHops(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		if err := migrateRelay(t, p); err != nil {
			t.Fatal(err)
		}
		broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100, BlockPublishUntilSubscriberAck: false}, watermill.NopLogger{})
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Retry = inbox.Retry{Tries: 3, Backoff: time.Millisecond} })
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddMiddleware(in.PerHandler)
		marshaler := cqrs.JSONMarshaler{}
		name := func(v any) string { return marshaler.Name(v) }
		events, err := cqrs.NewEventBusWithConfig(p.box.ContextPublisher(), cqrs.EventBusConfig{
			Marshaler:            marshaler,
			GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) { return params.EventName, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		commands, err := cqrs.NewCommandBusWithConfig(p.box.ContextPublisher(), cqrs.CommandBusConfig{
			Marshaler:            marshaler,
			GeneratePublishTopic: func(params cqrs.CommandBusGeneratePublishTopicParams) (string, error) { return params.CommandName, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		eventProcessor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
			Marshaler: marshaler,
			GenerateSubscribeTopic: func(params cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
				return params.EventName, nil
			},
			SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) { return broker, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		commandProcessor, err := cqrs.NewCommandProcessorWithConfig(router, cqrs.CommandProcessorConfig{
			Marshaler: marshaler,
			GenerateSubscribeTopic: func(params cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) {
				return params.CommandName, nil
			},
			SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) { return broker, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		var runs atomic.Int32
		note := func(ctx context.Context, what string, err error) error {
			tx, terr := handlerTx(ctx)
			if terr != nil {
				return terr
			}
			_, xerr := tx.ExecContext(ctx, `insert into effects (message_id, note) values ('x', $1)`, what)
			if runs.Add(1)%2 == 1 {
				err = errUndo
			}
			return errors.Join(err, xerr)
		}
		for _, add := range []error{
			eventProcessor.AddHandlers(
				cqrs.NewEventHandler("warehouse", func(ctx context.Context, e *placed) error {
					return note(ctx, "warehouse", commands.Send(ctx, &pack{ID: e.ID}))
				}),
				cqrs.NewEventHandler("mail", func(ctx context.Context, _ *placed) error { return note(ctx, "mail", nil) }),
				cqrs.NewEventHandler("invoice", func(ctx context.Context, _ *packed) error { return note(ctx, "invoice", nil) }),
			),
			commandProcessor.AddHandlers(cqrs.NewCommandHandler("packing", func(ctx context.Context, c *pack) error {
				return note(ctx, "packing", events.Publish(ctx, &packed{ID: c.ID}))
			})),
		} {
			expectNoError(t, add)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 2)
		go func() { ended <- router.Run(ctx) }()
		<-router.Running()
		r, err := relay.New(p.box, relay.FromPublisher(twice{broker}), relay.Config{})
		if err != nil {
			t.Fatal(err)
		}
		go func() { ended <- r.Run(ctx) }()
		const orders = 3
		for i := range orders {
			msg, err := marshaler.Marshal(&placed{ID: fmt.Sprint(i)})
			expectNoError(t, err)
			expectNoError(t, twice{broker}.Publish(name(&placed{}), msg))
		}
		eventually(t, "all have their effects", func() bool { return p.count(t, `select count(*) from effects`) >= 4*orders })
		expectNoError(t, router.Close())
		cancel()
		expectNoError(t, errors.Join(<-ended, <-ended, broker.Close()))
		for _, what := range []string{"warehouse", "mail", "packing", "invoice"} {
			if n := p.count(t, `select count(*) from effects where note = $1`, what); n != orders {
				t.Errorf("%s: %d effects", what, n)
			}
		}
		if n := p.count(t, `select count(*) from {{inbox}} where consumer = 'stock/mail'`); n != orders {
			t.Errorf("%d ids of a handler", n)
		}
	})
}

// twice publishes everything twice.
type twice struct{ message.Publisher }

func (p twice) Publish(topic string, messages ...*message.Message) error {
	for range 2 {
		for _, msg := range messages {
			if err := p.Publisher.Publish(topic, msg.Copy()); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestPerHandler_NeedsARouter(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		_, err := p.inbox(t, nil).PerHandler(effect)(message.NewMessageWithContext(t.Context(), "a", nil))
		expectError(t, err, inbox.ErrNoHandler)
	})
}

func TestPerHandler_EachHandlerIsAConsumer(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		for _, name := range []string{"warehouse", "mail"} {
			handle := in.PerHandler(effect)
			for range 2 {
				_, err := handle(routedTo(t, name, "a", "results"))
				expectNoError(t, err)
			}
		}
		p.expect(t, 2, 2, 0)
	})
}

func TestSequence_EnforcesTheOrderOfAKey(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.GapWait = 100 * time.Millisecond
			cfg.Sequence = func(msg *message.Message) (int64, bool) {
				var n int64
				_, err := fmt.Sscan(msg.Metadata.Get("seq"), &n)
				return n, err == nil
			}
		})
		send := func(key string, seq int, attempt string) error {
			msg := message.NewMessageWithContext(t.Context(), fmt.Sprint(key, seq, attempt), nil)
			msg.Metadata.Set("oncemill_key", key)
			msg.Metadata.Set("seq", fmt.Sprint(seq))
			return deliverMessage(t, in, msg, effect)
		}
		expectNoError(t, send("a", 5, ""))
		expectError(t, send("a", 7, ""), inbox.ErrGap)
		expectNoError(t, send("b", 1, ""))
		expectNoError(t, send("a", 6, ""))
		expectNoError(t, send("a", 7, ""))
		expectNoError(t, send("a", 6, " again with another id")) // outdated
		p.expect(t, 4, 5, 0)
		expectError(t, send("a", 10, ""), inbox.ErrGap)
		eventually(t, "the gap is not waited for any longer", func() bool { return send("a", 10, "") == nil })
		expectNoError(t, send("a", 9, "")) // too late
		p.expect(t, 5, 7, 0)
		// Without a key or a number nothing is enforced.
		expectNoError(t, send("", 3, ""))
		expectNoError(t, deliver(t, in, "plain", effect))
		p.expect(t, 7, 9, 0)
	})
}
