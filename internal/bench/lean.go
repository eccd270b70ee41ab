package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/lib/pq"
	amqp "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"
)

// leanAlone is what a consumer comes to that does nothing but what has to be done, for
// this one handler and with nothing that could fail: a bound for the row inbox.
func leanAlone(ctx context.Context, b *bench) ([]result, error) {
	sides := []side{b.oursConsuming("ours", inboxBacklog, 0, 1, each(true, addRow))}
	for _, loops := range []int{1, 2, 4} {
		sides = append(sides, b.lean(loops))
	}
	_, err := b.rounds(ctx, "lean", "msg/s", sides...)
	return nil, err
}

const leanBatch = 150

// lean consumes in batches, by several loops over one channel: the ids of a batch in
// one statement, a statement for each effect, all of them prepared, and one
// acknowledgement for the batch. Batches are acknowledged in order.
func (b *bench) lean(loops int) side {
	return b.byHand(fmt.Sprintf("lean, %d loops", loops), func(ctx context.Context, db *sql.DB, ch *amqp.Channel, deliveries <-chan amqp.Delivery, n int) error {
		return leanLoops(ctx, db, ch, deliveries, loops, n)
	})
}

func leanLoops(ctx context.Context, db *sql.DB, ch *amqp.Channel, deliveries <-chan amqp.Delivery, loops, n int) error {
	type job struct {
		batch []amqp.Delivery
		done  chan struct{}
	}
	jobs, order := make(chan job), make(chan job, loops)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { // reads
		defer close(jobs)
		defer close(order)
		for read := 0; read < n; {
			batch, err := nextBatch(ctx, deliveries, min(leanBatch, n-read))
			if err != nil {
				return err
			}
			read += len(batch)
			j := job{batch, make(chan struct{})}
			for _, to := range []chan<- job{jobs, order} {
				select {
				case to <- j:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
		return nil
	})
	for range loops {
		group.Go(func() error {
			conn, err := newLeanConn(ctx, db)
			if err != nil {
				return err
			}
			defer conn.close()
			for j := range jobs {
				if err := conn.handle(ctx, j.batch); err != nil {
					return err
				}
				close(j.done)
			}
			return nil
		})
	}
	group.Go(func() error { // acknowledges
		for j := range order {
			select {
			case <-j.done:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := ch.Ack(j.batch[len(j.batch)-1].DeliveryTag, true); err != nil {
				return err
			}
		}
		return nil
	})
	return group.Wait()
}

// leanConn is a connection with its statements.
type leanConn struct {
	conn        *sql.Conn
	ids, effect *sql.Stmt
}

func newLeanConn(ctx context.Context, db *sql.DB) (*leanConn, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	ids, err := conn.PrepareContext(ctx, `insert into bench_ids (message_id) select id from unnest($1::text[]) as id on conflict do nothing`)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	effect, err := conn.PrepareContext(ctx, `insert into bench_effects (message_id, payload) values ($1, $2)`)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &leanConn{conn, ids, effect}, nil
}

// close leaves the statements to their connection. Its work is committed.
func (c *leanConn) close() { _ = c.conn.Close() }

func (c *leanConn) handle(ctx context.Context, batch []amqp.Delivery) error {
	tx, err := c.conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	ids := make([]string, len(batch))
	for i := range batch {
		ids[i] = batch[i].MessageId
	}
	result, err := c.ids.ExecContext(ctx, pq.Array(ids)) // on the connection of the transaction
	if err != nil {
		return err
	}
	if added, err := result.RowsAffected(); err != nil || added != int64(len(batch)) {
		return errors.Join(err, fmt.Errorf("%d of %d ids are new", added, len(batch)))
	}
	for i := range batch {
		if _, err := c.effect.ExecContext(ctx, batch[i].MessageId, batch[i].Body); err != nil {
			return err
		}
	}
	return tx.Commit()
}
