package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// An event that cannot be read becomes a dead letter at its first delivery.
func TestCQRS_AnUnreadableEventIsDeadAtOnce(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		letters := p.letterStore(t)
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.DeadLetters = letters })
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddMiddleware(in.PerHandler)
		broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 10}, watermill.NopLogger{})
		marshaler := inbox.CQRS(cqrs.JSONMarshaler{})
		processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
			Marshaler: marshaler,
			GenerateSubscribeTopic: func(params cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
				return params.EventName, nil
			},
			SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) { return broker, nil },
		})
		expectNoError(t, err)
		handled := make(chan string, 10)
		expectNoError(t, processor.AddHandlers(cqrs.NewEventHandler("warehouse", func(_ context.Context, e *placed) error {
			handled <- e.ID
			return nil
		})))
		ended := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { ended <- router.Run(ctx) }()
		<-router.Running()
		good, err := marshaler.Marshal(&placed{ID: "tea"})
		expectNoError(t, err)
		bad := good.Copy()
		bad.UUID, bad.Payload = watermill.NewUUID(), []byte(`{"ID": 7}`)
		expectNoError(t, broker.Publish(marshaler.Name(&placed{}), bad, good))
		if id := <-handled; id != "tea" {
			t.Errorf("handled %q", id)
		}
		var dead []*dlq.Letter
		eventually(t, "the bad event is a dead letter", func() bool {
			dead, err = letters.List(t.Context(), dlq.Filter{})
			expectNoError(t, err)
			return len(dead) == 1
		})
		if l := dead[0]; l.MessageID != bad.UUID || l.Reason != string(inbox.ReasonPermanent) || l.Tries != 1 {
			t.Errorf("dead letter %+v", l)
		}
		cancel()
		expectNoError(t, <-ended)
	})
	var broken *inbox.PayloadError
	err := inbox.CQRS(cqrs.JSONMarshaler{}).Unmarshal(message.NewMessage("1", []byte("{")), &placed{})
	if !errors.As(err, &broken) || broken.Err == nil {
		t.Errorf("got %v", err)
	}
}
