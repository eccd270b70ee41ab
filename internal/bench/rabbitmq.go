package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"
)

// queueArguments are of a quorum queue: it confirms what is on disk. The classic queues of
// RabbitMQ 3 accept half as many messages, so that rows would compare little else.
var queueArguments = amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}

// queueName is also the routing key: everybody publishes through the default exchange to
// one durable queue.
const queueName = topic

// topology is what everybody who uses watermill-amqp's configuration has.
func (b *bench) topology() wamqp.Config {
	cfg := wamqp.NewDurableQueueConfig(b.amqp)
	cfg.Queue.Arguments = queueArguments
	return cfg
}

// freshQueue deletes the queue and declares it again, so that every run starts with the
// same empty one.
func (b *bench) freshQueue() error {
	return b.withChannel(func(ch *amqp.Channel) error {
		if _, err := ch.QueueDelete(queueName, false, false, false); err != nil {
			return fmt.Errorf("delete queue: %w", err)
		}
		if _, err := ch.QueueDeclare(queueName, true, false, false, false, queueArguments); err != nil {
			return fmt.Errorf("declare queue: %w", err)
		}
		return nil
	})
}

// verifyQueue takes everything out of the queue and checks that it is the first n
// messages of the traffic, each once, and in order per key if ordered is set.
func (b *bench) verifyQueue(ctx context.Context, t *traffic, n int, ordered bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return b.withChannel(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queueName, true, false, false, false, queueArguments)
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
			d, err := next(ctx, deliveries)
			if err != nil {
				return fmt.Errorf("consume: %w after %d of %d messages", err, book.arrived, n)
			}
			id, _ := d.Headers["_watermill_message_uuid"].(string) // where stock publishers put it
			book.arrive(id, d.Body)
		}
		return book.check(ordered)
	})
}

func next(ctx context.Context, deliveries <-chan amqp.Delivery) (amqp.Delivery, error) {
	select {
	case d, ok := <-deliveries:
		if !ok {
			return d, amqp.ErrClosed
		}
		return d, nil
	case <-ctx.Done():
		return amqp.Delivery{}, ctx.Err()
	}
}

func (b *bench) withChannel(fn func(*amqp.Channel) error) error {
	conn, err := amqp.Dial(b.amqp)
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

// raw publishes with amqp091-go alone, at the best window.
func (b *bench) raw(ctx context.Context) (side, error) {
	sized := func(n, window int) side {
		name := fmt.Sprintf("amqp091-go alone publishing from memory, pipelined confirms, window %d", window)
		return side{name: name, n: n, run: func(ctx context.Context, n int) (values, error) {
			if err := b.freshQueue(); err != nil {
				return nil, err
			}
			took, err := b.publishRaw(ctx, b.traffic, n, window)
			if err != nil {
				return nil, err
			}
			return perSecond(n, took), b.verifyQueue(ctx, b.traffic, n, true)
		}}
	}
	return best(ctx, b, []int{100, 500, 2000}, rabbitBacklog/5, rabbitBacklog, sized)
}

// publishRaw publishes the first n messages on one channel with deferred confirms. At most
// window of them are open; the oldest is awaited when the window is full. It returns the
// time from before connecting to the last confirm: what a relay has to do too.
func (b *bench) publishRaw(ctx context.Context, t *traffic, n, window int) (took time.Duration, err error) {
	begin := time.Now()
	err = b.withChannel(func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return fmt.Errorf("confirm mode: %w", err)
		}
		returns := ch.NotifyReturn(make(chan amqp.Return, window))
		open := make([]*amqp.DeferredConfirmation, window)
		for i := range n + window {
			if oldest := open[i%window]; oldest != nil {
				if err := confirmed(ctx, oldest); err != nil {
					return err
				}
				open[i%window] = nil
			}
			if i >= n {
				continue
			}
			dc, err := ch.PublishWithDeferredConfirm("", queueName, true, false, rawPublishing(t, i, begin))
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			open[i%window] = dc
		}
		took = time.Since(begin)
		if len(returns) > 0 {
			return errors.New("publish: a message was returned as unroutable")
		}
		return nil
	})
	return took, err
}

func confirmed(ctx context.Context, dc *amqp.DeferredConfirmation) error {
	acked, err := dc.WaitContext(ctx)
	if err != nil {
		return fmt.Errorf("await confirm: %w", err)
	}
	if !acked {
		return errors.New("await confirm: nack, or the channel was closed")
	}
	return nil
}

// rawPublishing has the same properties and headers on the wire as what our sink sends for
// the same message.
func rawPublishing(t *traffic, i int, now time.Time) amqp.Publishing {
	id := t.id(i)
	return amqp.Publishing{
		DeliveryMode: amqp.Persistent,
		MessageId:    id,
		Type:         topic,
		Timestamp:    now,
		Headers: amqp.Table{
			"_watermill_message_uuid": id,
			"oncemill_key":            t.key(i),
			"oncemill_id":             fmt.Sprintf("%d/%d", t.keyNumber(i)%32, i),
		},
		Body: t.payload(i),
	}
}
