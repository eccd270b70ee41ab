package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/internal/plain"
	"github.com/oncemill/oncemill/examples/shop"
)

// router returns the consumer: the inventory behind once.
func (s service) router(db *sql.DB, once message.HandlerMiddleware) (*message.Router, error) {
	inventory, err := shop.NewInventory(db)
	if err != nil {
		return nil, err
	}
	subscriber, err := newSubscriber(s.broker, s.logger)
	if err != nil {
		return nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NewSlogLogger(s.logger))
	if err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	router.AddMiddleware(s.around...)
	router.AddMiddleware(once)
	router.AddConsumerHandler("inventory", topic, subscriber, func(msg *message.Message) error {
		err := inventory.Handle(msg)
		if err == nil && s.booked != nil {
			s.report(msg)
		}
		return err
	})
	return router, nil
}

// dedup returns what stands between the broker and the effect: the inbox, with what
// removes its old ids, or, to see what it is good for, a transaction alone.
func (s service) dedup(db *sql.DB) (once message.HandlerMiddleware, forget func(context.Context) error, err error) {
	if !s.inbox {
		return plain.Transaction(db), func(context.Context) error { return nil }, nil
	}
	in, err := shop.NewInbox(db, oncemill.Config{}, s.logger)
	if err != nil {
		return nil, nil, err
	}
	return in.Middleware, in.Run, nil
}

func (s service) report(msg *message.Message) {
	var placed shop.Placed
	if err := json.Unmarshal(msg.Payload, &placed); err == nil { // the inventory has read it before
		s.booked(placed.Order.ID, placed.Order.Customer)
	}
}

// newPublisher returns Watermill's stock JetStream publisher. It leaves
// JetStream's own deduplication off (TrackMsgId): the inbox needs none.
func newPublisher(url string, logger *slog.Logger) (message.Publisher, error) {
	publisher, err := wmnats.NewPublisher(wmnats.PublisherConfig{
		URL:         url,
		NatsOptions: []nats.Option{nats.MaxReconnects(-1)},
	}, watermill.NewSlogLogger(logger))
	if err != nil {
		return nil, fmt.Errorf("make publisher: %w", err)
	}
	return publisher, nil
}

// ackWait is how long JetStream waits for the acknowledgement of a message whose
// consumer was killed before it delivers it again.
const ackWait = 2 * time.Second

// newSubscriber returns Watermill's stock JetStream subscriber.
func newSubscriber(url string, logger *slog.Logger) (message.Subscriber, error) {
	subscriber, err := wmnats.NewSubscriber(wmnats.SubscriberConfig{
		URL:         url,
		NatsOptions: []nats.Option{nats.MaxReconnects(-1)},
		JetStream: wmnats.JetStreamConfig{
			DurablePrefix: "inventory",
			SubscribeOptions: []nats.SubOpt{
				nats.DeliverAll(),
				nats.AckExplicit(),
				// Without it the client acknowledges whatever comes back,
				// a message that was not handled because of a stop, too.
				nats.ManualAck(),
				nats.AckWait(ackWait),
				// A message that is delivered again comes after those that
				// were sent meanwhile; with one at a time there are none, and
				// the effects keep the order of the messages.
				nats.MaxAckPending(1),
			},
		},
	}, watermill.NewSlogLogger(logger))
	if err != nil {
		return nil, fmt.Errorf("make subscriber: %w", err)
	}
	return subscriber, nil
}
