package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/crucible/work"
)

// canary tells when the servers themselves, or this machine, are slow: a commit and a
// confirmed message of its own, four times a second, on connections without a proxy.
type canary struct {
	postgres string
	amqp     []string
	queues   []string
	history  *history.Writer
}

const (
	beat = 250 * time.Millisecond

	// slow is how long a beat may take before the servers count as slow: much longer than on
	// any machine that is not busy with something else.
	slow = 400 * time.Millisecond

	beatTimeout = 2 * time.Second
)

func (c *canary) run(ctx context.Context) error {
	db, err := sql.Open("postgres", c.postgres+"&application_name=canary&connect_timeout=2")
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // nothing is left to do
	var group sync.WaitGroup
	defer group.Wait()
	failed := make(chan error, 2)
	group.Go(func() { failed <- c.watch(ctx, "postgres", func(ctx context.Context) error { return commit(ctx, db) }) })
	broker := &brokerCanary{uris: c.amqp, queues: c.queues}
	defer broker.close()
	group.Go(func() { failed <- c.watch(ctx, "rabbitmq", broker.publish) })
	return <-failed
}

// watch beats until ctx ends and writes down each time that was slow.
func (c *canary) watch(ctx context.Context, target string, once func(context.Context) error) error {
	last := time.Now() // when all was well
	ticker := time.NewTicker(beat)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		err := once(ctx)
		now := time.Now()
		if err != nil {
			continue
		}
		if now.Sub(last) > slow+beat {
			err := c.history.Add(history.Record{At: now, Event: history.EventSlow, Fault: &history.Fault{Kind: "slow", Target: target, Since: last}})
			if err != nil {
				return err
			}
		}
		last = now
	}
}

func commit(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, beatTimeout)
	defer cancel()
	_, err := db.ExecContext(ctx, "update app.canary set beats = beats + 1")
	return err
}

// brokerCanary publishes to queues, whose consumers drop its messages.
type brokerCanary struct {
	uris   []string
	queues []string
	dials  int
	conn   *amqp091.Connection
	ch     *amqp091.Channel
}

var errNoConfirm = errors.New("no confirm")

func (b *brokerCanary) publish(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, beatTimeout)
	defer cancel()
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.conn == nil {
		b.dials++
		if b.conn, err = amqp091.DialConfig(b.uris[b.dials%len(b.uris)], amqp091.Config{Heartbeat: 5 * time.Second, Dial: amqp091.DefaultDial(beatTimeout)}); err != nil {
			return err
		}
		if b.ch, err = b.conn.Channel(); err != nil {
			return err
		}
		if err = b.ch.Confirm(false); err != nil {
			return err
		}
	}
	var confirms []*amqp091.DeferredConfirmation
	for _, queue := range b.queues {
		confirm, err := b.ch.PublishWithDeferredConfirmWithContext(ctx, "", queue, true, false, amqp091.Publishing{
			DeliveryMode: amqp091.Persistent, MessageId: watermill.NewUUID(), Headers: amqp091.Table{work.MetaCanary: "1"},
		})
		if err != nil {
			return err
		}
		confirms = append(confirms, confirm)
	}
	for _, confirm := range confirms {
		acked, err := confirm.WaitContext(ctx)
		if err == nil && !acked {
			err = errNoConfirm
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *brokerCanary) close() {
	if b.conn != nil {
		_ = b.conn.CloseDeadline(time.Now().Add(beatTimeout)) // it may be broken
	}
	b.conn, b.ch = nil, nil
}
