package main

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/work"
)

// recorder writes down every message of the mirror queue. It is a plain AMQP client.
type recorder struct {
	uris    []string
	history *history.Writer
	seen    atomic.Int64
	last    time.Time // of the last delivery

	mu  sync.Mutex
	ids map[string]struct{}
}

// run records until ctx ends, over as many connections as that takes.
func (r *recorder) run(ctx context.Context) error {
	for session := 1; ctx.Err() == nil; session++ {
		err := r.record(ctx, session, r.uris[session%len(r.uris)])
		var broken *brokenHistory
		if errors.As(err, &broken) {
			return broken
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// brokenHistory is an error that makes the run worthless.
type brokenHistory struct{ error }

func (r *recorder) record(ctx context.Context, session int, uri string) error {
	conn, err := amqp091.DialConfig(uri, amqp091.Config{Heartbeat: time.Second, Dial: amqp091.DefaultDial(3 * time.Second)})
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // unacknowledged messages come again
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.ConsumeWithContext(ctx, mirrorQueue, "recorder", false, false, false, false, nil)
	if err != nil {
		return err
	}
	// All messages pass the one queue: an acknowledgement for each would be half of its work.
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var newest *amqp091.Delivery // not acknowledged yet, like those before it
	for last, unacked := r.last, 0; ; {
		select {
		case d, ok := <-deliveries:
			if !ok {
				return nil
			}
			if r.last = time.Now(); !last.IsZero() { // the first since the connection was lost
				blind := &history.Fault{Kind: "slow", Target: "crucible", Since: last}
				if err := r.history.Add(history.Record{At: r.last, Event: history.EventSlow, Fault: blind}); err != nil {
					return &brokenHistory{err}
				}
				last = time.Time{}
			}
			if _, ok := d.Headers[work.MetaCanary]; !ok {
				if err := r.write(&d, session); err != nil {
					return &brokenHistory{err}
				}
			}
			newest = &d
			if unacked++; unacked < ackEvery {
				continue
			}
		case <-ticker.C:
			if newest == nil {
				continue
			}
		}
		if err := newest.Ack(true); err != nil {
			return err
		}
		newest, unacked = nil, 0
	}
}

const (
	prefetch = 256
	ackEvery = prefetch / 4
)

func (r *recorder) write(d *amqp091.Delivery, session int) error {
	copied := copyOf(d, session)
	if err := r.history.Add(history.Record{Event: history.EventWire, Copy: copied}); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ids[copied.MessageID] = struct{}{}
	r.seen.Add(1)
	return nil
}

// different returns how many different messages were recorded.
func (r *recorder) different() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.ids)
}

func copyOf(d *amqp091.Delivery, session int) *history.Copy {
	metadata := make(map[string]string, len(d.Headers))
	for name, value := range d.Headers {
		if text, ok := value.(string); ok {
			metadata[name] = text
		} else {
			metadata[name] = "not a string" // which no producer sends
		}
	}
	seq, err := strconv.ParseInt(metadata["seq"], 10, 64)
	if err != nil {
		seq = -1 // the sum differs too
	}
	return &history.Copy{
		MessageID: cmp.Or(d.MessageId, metadata[amqp.DefaultMessageUUIDHeaderKey]), Topic: d.Exchange, Key: metadata["oncemill_key"], Row: metadata["oncemill_id"],
		Seq: seq, Attempt: metadata["attempt"], Sum: history.SumOf(d.Body, metadata),
		Redelivered: d.Redelivered, Session: session,
	}
}
