package main

import (
	"context"
	"fmt"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"
)

// queueArguments are those of a queue of a kind. Quorum queues are what RabbitMQ offers
// for messages that must not be lost: they confirm what is on disk. The classic ones
// of RabbitMQ 3 take in half as much on these machines, so that rows which fill one
// compare little but the queue.
var queueArguments = map[string]amqp.Table{
	"quorum":  {amqp.QueueTypeArg: amqp.QueueTypeQuorum},
	"classic": {amqp.QueueTypeArg: amqp.QueueTypeClassic},
}

// topology is what everybody who uses watermill-amqp's configuration has.
func (b *bench) topology() wamqp.Config {
	cfg := wamqp.NewDurableQueueConfig(b.servers.amqp)
	cfg.Queue.Arguments = queueArguments[b.queue]
	return cfg
}

// queueName is also the routing key: everybody publishes through the default
// exchange to one durable queue.
const queueName = topic

// freshQueue deletes the queue and declares it again, so that every run starts
// with the same empty one.
func (b *bench) freshQueue() error {
	return withChannel(b.servers.amqp, func(ch *amqp.Channel) error {
		if _, err := ch.QueueDelete(queueName, false, false, false); err != nil {
			return fmt.Errorf("delete queue: %w", err)
		}
		if _, err := ch.QueueDeclare(queueName, true, false, false, false, queueArguments[b.queue]); err != nil {
			return fmt.Errorf("declare queue: %w", err)
		}
		return nil
	})
}

// verifyQueue takes everything out of the queue and checks that it is the first
// n messages of the traffic, each once, and in order per key if ordered is set.
func (b *bench) verifyQueue(ctx context.Context, t *traffic, n int, ordered bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return withChannel(b.servers.amqp, func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queueName, true, false, false, false, queueArguments[b.queue])
		if err != nil {
			return fmt.Errorf("look at queue: %w", err)
		}
		if q.Messages != n {
			return fmt.Errorf("the queue holds %d messages, not %d", q.Messages, n)
		}
		deliveries, err := ch.Consume(queueName, "", true, true, false, false, nil)
		if err != nil {
			return fmt.Errorf("consume: %w", err)
		}
		book := newLedger(t, n)
		for range n {
			select {
			case d, ok := <-deliveries:
				if !ok {
					return fmt.Errorf("consume: %w", amqp.ErrClosed)
				}
				book.arrive(deliveryID(d), d.Body)
			case <-ctx.Done():
				return fmt.Errorf("consume: %w after %d of %d messages", ctx.Err(), book.arrived, n)
			}
		}
		return book.verdict(ordered)
	})
}

// deliveryID finds the message id where stock Watermill publishers put it.
func deliveryID(d amqp.Delivery) string {
	id, _ := d.Headers["_watermill_message_uuid"].(string)
	return id
}

func withChannel(uri string, fn func(*amqp.Channel) error) error {
	conn, err := amqp.Dial(uri)
	if err != nil {
		return fmt.Errorf("connect to RabbitMQ: %w", err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	return fn(ch)
}
