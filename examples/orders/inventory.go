package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/examples/internal/demo"
	"github.com/oncemill/oncemill/examples/internal/plain"
	"github.com/oncemill/oncemill/examples/shop"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
)

// runInventory books orders: Watermill's router and stock RabbitMQ subscriber,
// with an inbox as middleware.
func runInventory(ctx context.Context, args []string) error {
	var s settings
	flags := s.flags("inventory")
	once := flags.Bool("inbox", true, "remove duplicates; false shows what happens without")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	db, err := s.open()
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // every commit has been reported by then
	return s.runUnder(ctx, func(ctx context.Context, worker *demo.Worker) error {
		dedup, forget := plain.Transaction(db), func(context.Context) error { return nil }
		if *once {
			in, err := shop.NewInbox(db, s.tables(), s.logger)
			if err != nil {
				return err
			}
			dedup, forget = in.Middleware, in.Run
		}
		router, err := s.router(db, dedup, worker)
		if err != nil {
			return err
		}
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return router.Run(ctx) })
		group.Go(func() error { return forget(ctx) }) // removes old ids
		if worker != nil {
			group.Go(func() error {
				select {
				case <-router.Running():
					return worker.Ready("")
				case <-ctx.Done():
					return nil
				}
			})
		}
		return group.Wait()
	})
}

func (s *settings) router(db *sql.DB, dedup message.HandlerMiddleware, worker *demo.Worker) (*message.Router, error) {
	inventory, err := shop.NewInventory(db)
	if err != nil {
		return nil, err
	}
	logger := watermill.NewSlogLogger(s.logger)
	subscriber, err := amqp.NewSubscriber(s.subscription(), logger)
	if err != nil {
		return nil, fmt.Errorf("make subscriber: %w", err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return nil, fmt.Errorf("make router: %w", err)
	}
	if worker != nil {
		router.AddMiddleware(worker.Middleware)
	}
	router.AddMiddleware(dedup)
	router.AddConsumerHandler("inventory", s.topic, subscriber, inventory.Handle)
	return router, nil
}

// subscription is the stock configuration with a marshaler that reads whatever
// other tools put into the headers.
func (s *settings) subscription() amqp.Config {
	config := s.rabbit()
	config.Marshaler = inboxrabbitmq.Marshaler{}
	// Of several inventories one is served at a time, the next one only after
	// the messages of the last are back in the queue: effects keep the order of
	// the messages, also when a killed inventory's successor is quick.
	config.Queue.Arguments = amqp091.Table{"x-single-active-consumer": true}
	return config
}
