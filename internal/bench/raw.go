package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// rawWindows are the sizes of window that are tried; the best one is the
// yardstick.
var rawWindows = []int{100, 500, 2000}

// publishRaw publishes the first n messages with amqp091-go alone: one channel,
// deferred confirms, at most window of them open, the oldest awaited when the
// window is full. It returns the time from before connecting to the last
// confirm: what a relay has to do too.
func publishRaw(ctx context.Context, uri string, t *traffic, n, window int) (time.Duration, error) {
	begin := time.Now()
	var took time.Duration
	err := withChannel(uri, func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return fmt.Errorf("confirm mode: %w", err)
		}
		returns := ch.NotifyReturn(make(chan amqp.Return, window))
		open := make([]*amqp.DeferredConfirmation, window)
		for i := range n {
			if oldest := open[i%window]; oldest != nil {
				if err := confirmed(ctx, oldest); err != nil {
					return err
				}
			}
			dc, err := ch.PublishWithDeferredConfirm("", queueName, true, false, rawPublishing(t, i, begin))
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
			open[i%window] = dc
		}
		for i := range open {
			if dc := open[(n+i)%window]; dc != nil {
				if err := confirmed(ctx, dc); err != nil {
					return err
				}
			}
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

// rawPublishing has the same properties and headers on the wire as what our
// sink sends for the same message.
func rawPublishing(t *traffic, i int, now time.Time) amqp.Publishing {
	id, key := t.id(i), t.key(i)
	return amqp.Publishing{
		DeliveryMode: amqp.Persistent,
		MessageId:    id,
		Type:         topic,
		Timestamp:    now,
		Headers: amqp.Table{
			"_watermill_message_uuid": id,
			"oncemill_key":            key,
			"oncemill_id":             fmt.Sprintf("%d/%d", t.keyNumber(i)%32, i),
		},
		Body: t.payload(i),
	}
}
