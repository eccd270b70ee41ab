package verify

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/cmd/oncemill/internal/verify/check"
	"github.com/oncemill/oncemill/internal/sleep"
)

const (
	keptDeliveries = 64       // may be published again
	headerByHand   = "byhand" // of what the run itself publishes again
	sentinelType   = "oncemill_verify_end"
)

// wire is the run's own view of the broker: a queue that gets every message.
type wire struct {
	*Access
	ended chan struct{} // closed when the sentinel has arrived: nothing before it is missing

	mu     sync.Mutex
	copies []check.Copy
	seen   map[string]bool
	recent []amqp091.Delivery
}

func newWire(a *Access) *wire {
	return &wire{Access: a, seen: map[string]bool{}, ended: make(chan struct{})}
}

// record records until ctx ends or the sentinel has arrived, over as many connections as that
// takes.
func (w *wire) record(ctx context.Context) {
	for ctx.Err() == nil {
		_ = w.recordOnce(ctx) // what was not acknowledged comes again
		select {
		case <-w.ended:
			return
		default:
			sleep.For(ctx, 200*time.Millisecond)
		}
	}
}

func (w *wire) recordOnce(ctx context.Context) error {
	return w.onChannel(func(ch *amqp091.Channel) error {
		if err := ch.Qos(256, 0, false); err != nil {
			return err
		}
		deliveries, err := ch.ConsumeWithContext(ctx, w.mirror(), "", false, true, false, false, nil)
		if err != nil {
			return err
		}
		for d := range deliveries {
			if d.Type == sentinelType {
				close(w.ended)
				return nil
			}
			w.add(d)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
		return errors.New("the subscription has ended")
	})
}

func (w *wire) add(d amqp091.Delivery) {
	text := func(name string) string {
		value, _ := d.Headers[name].(string)
		return value
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Redelivered && w.seen[d.MessageId] {
		return // it was not acknowledged when the connection was lost
	}
	w.seen[d.MessageId] = true
	w.copies = append(w.copies, check.Copy{
		MessageID: d.MessageId, Topic: d.Exchange, Key: text("oncemill_key"), Attempt: text(metaAttempt),
		Sum: sumOf(d.Body), ByHand: text(headerByHand) != "",
	})
	if text(headerByHand) == "" {
		w.recent = append(w.recent, d)
		w.recent = w.recent[max(0, len(w.recent)-keptDeliveries):]
	}
}

// different returns how many different messages have arrived.
func (w *wire) different() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.seen)
}

// received returns how many messages have arrived.
func (w *wire) received() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.copies)
}

// publishAgain publishes copies of up to n messages and returns how many.
func (w *wire) publishAgain(ctx context.Context, r *rand.Rand, n int) (int, error) {
	w.mu.Lock()
	var chosen []amqp091.Delivery
	for _, i := range r.Perm(len(w.recent))[:min(n, len(w.recent))] {
		chosen = append(chosen, w.recent[i])
	}
	w.mu.Unlock()
	return len(chosen), w.onChannel(func(ch *amqp091.Channel) error {
		for _, d := range chosen {
			headers := amqp091.Table{headerByHand: "yes"}
			for name, value := range d.Headers {
				headers[name] = value
			}
			err := publish(ctx, ch, d.Exchange, d.RoutingKey, amqp091.Publishing{
				Headers: headers, ContentType: d.ContentType, DeliveryMode: d.DeliveryMode, MessageId: d.MessageId,
				Timestamp: d.Timestamp, Type: d.Type, Body: d.Body,
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// sendSentinel publishes the last message of the queue.
func (w *wire) sendSentinel(ctx context.Context) error {
	return w.onChannel(func(ch *amqp091.Channel) error {
		return publish(ctx, ch, "", w.mirror(), amqp091.Publishing{Type: sentinelType})
	})
}

// publish publishes a message and waits for the confirm.
func publish(ctx context.Context, ch *amqp091.Channel, exchange, key string, p amqp091.Publishing) error {
	if err := ch.Confirm(false); err != nil {
		return err
	}
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, exchange, key, true, false, p)
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err == nil && !acked {
		err = errors.New("RabbitMQ refused the message")
	}
	return err
}

// waiting returns how many messages of the consumers' queues are not being handled.
func (w *wire) waiting() (n int, err error) {
	err = w.onChannel(func(ch *amqp091.Channel) error {
		for _, consumer := range []string{roleFirst, roleSecond} {
			queue, err := ch.QueueDeclarePassive(w.queue(consumer), true, false, false, false, nil)
			if err != nil {
				return err
			}
			n += queue.Messages
		}
		return nil
	})
	return n, err
}
