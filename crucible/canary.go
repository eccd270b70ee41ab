package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/crucible/history"
)

// canary tells when the servers themselves, or this machine, are slow: a commit and a
// confirmed message of its own, four times a second, on connections without a proxy.
type canary struct {
	postgres string
	amqp     []string
	history  *history.Writer
}

const (
	beat = 250 * time.Millisecond

	// slow is how long a beat may take before the servers count as slow: much longer than on
	// any machine that is not busy with something else.
	slow = 400 * time.Millisecond

	beatTimeout = 2 * time.Second

	// spread is how often the canary's queues are spread over the nodes of a cluster again.
	spread = 15 * time.Second
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
	nothing := func(context.Context) error { return nil }
	group.Go(func() {
		failed <- c.watch(ctx, "postgres", func(ctx context.Context) error { return commit(ctx, db) }, nothing)
	})
	broker := &brokerCanary{uris: c.amqp}
	defer broker.close()
	group.Go(func() { failed <- c.watch(ctx, "rabbitmq", broker.publish, broker.tend) })
	return <-failed
}

// watch beats until ctx ends and writes down each time that was slow. What between does after a
// beat that went well does not count, if it succeeds.
func (c *canary) watch(ctx context.Context, target string, once, between func(context.Context) error) error {
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
		if between(ctx) == nil {
			last = last.Add(time.Since(now))
		}
	}
}

func commit(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, beatTimeout)
	defer cancel()
	_, err := db.ExecContext(ctx, "update app.canary set beats = beats + 1")
	return err
}

// brokerCanary publishes to queues of its own. On a cluster it has one for each node, with the
// node as its leader, so that it notices when the leaders of other queues on a node fail.
type brokerCanary struct {
	uris   []string
	dials  int
	conn   *amqp091.Connection
	ch     *amqp091.Channel
	placed time.Time // when the queues had their leaders
}

func canaryQueue(n int) string { return fmt.Sprint("canary", n) }

var errNoConfirm = errors.New("no confirm")

func (b *brokerCanary) dial(n int) (*amqp091.Connection, *amqp091.Channel, error) {
	conn, err := amqp091.DialConfig(b.uris[n%len(b.uris)], amqp091.Config{Heartbeat: 5 * time.Second, Dial: amqp091.DefaultDial(beatTimeout)})
	if err != nil {
		return nil, nil, err
	}
	ch, err := conn.Channel()
	if err != nil {
		hangUp(conn)
	}
	return conn, ch, err
}

func hangUp(conn *amqp091.Connection) { _ = conn.CloseDeadline(time.Now().Add(beatTimeout)) } // it may be broken

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
		if b.conn, b.ch, err = b.dial(b.dials); err != nil {
			return err
		}
		if err = b.ch.Confirm(false); err != nil {
			return err
		}
	}
	var confirms []*amqp091.DeferredConfirmation
	for n := range b.uris {
		// Before the queue exists, the broker confirms all the same.
		confirm, err := b.ch.PublishWithDeferredConfirmWithContext(ctx, "", canaryQueue(n), false, false, amqp091.Publishing{DeliveryMode: amqp091.Persistent})
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

// tend makes the queues, and on a cluster makes them anew from time to time, since leaders stay
// where a failure has sent them.
func (b *brokerCanary) tend(context.Context) error {
	if !b.placed.IsZero() && (len(b.uris) == 1 || time.Since(b.placed) < spread) {
		return nil
	}
	for n := range b.uris {
		if err := b.place(n); err != nil {
			return err
		}
	}
	b.placed = time.Now()
	return nil
}

func (b *brokerCanary) place(n int) error {
	conn, ch, err := b.dial(n)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	args := amqp091.Table{"x-max-length": 10}
	if len(b.uris) > 1 {
		args[amqp091.QueueTypeArg] = amqp091.QueueTypeQuorum
		args["x-queue-leader-locator"] = "client-local"
	}
	if _, err := ch.QueueDelete(canaryQueue(n), false, false, false); err != nil {
		return err
	}
	_, err = ch.QueueDeclare(canaryQueue(n), true, false, false, false, args)
	return err
}

func (b *brokerCanary) close() {
	if b.conn != nil {
		hangUp(b.conn)
	}
	b.conn, b.ch = nil, nil
}
