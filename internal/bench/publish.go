package main

import (
	"context"
	"database/sql"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/outbox"
)

const (
	publishTransactions = 10_000

	businessTables = `
create table if not exists business (id text primary key, customer text not null, amount bigint not null);
create table if not exists plain_outbox (
	id bigint generated always as identity primary key, topic text not null, message_id text not null,
	key text not null, payload bytea not null, metadata bytea not null, created_at timestamptz not null default now()
);
truncate business, plain_outbox`

	businessInsert = `insert into business (id, customer, amount) values ($1, $2, $3)`
	plainInsert    = `insert into plain_outbox (topic, message_id, key, payload, metadata) values ($1, $2, $3, $4, $5)`
)

// publish measures what the outbox adds to a business transaction.
func publish() scenario {
	return scenario{
		id: "publish", round: 5 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			box, err := outbox.New(b.db, outbox.Config{History: outbox.NoHistory, Prepare: true, Logger: b.log})
			if err != nil {
				return nil, err
			}
			ours := b.transactions("ours", `select count(*) from oncemill.outbox`, func(ctx context.Context, i int) error {
				return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
					if err := b.business(ctx, tx, i); err != nil {
						return err
					}
					topic, msg := b.traffic.message(i)
					return box.Publish(ctx, tx, topic, msg)
				})
			})
			plain := b.transactions("the same with a hand-written INSERT into a plain table", `select count(*) from plain_outbox`, func(ctx context.Context, i int) error {
				return inTx(ctx, b.db, func(tx *sql.Tx) error {
					if err := b.business(ctx, tx, i); err != nil {
						return err
					}
					_, err := tx.ExecContext(ctx, plainInsert, topic, b.traffic.id(i), b.traffic.key(i), b.traffic.payload(i), b.traffic.metadata(i))
					return err
				})
			})
			return []side{ours, plain}, nil
		},
		rows: []row{{
			"publish", "transactions of one business insert and one message, 8 at a time, the statement of the message prepared",
			figure{0, 0},
			figure{1, 0},
			"tx/s", atLeast(0.9),
		}},
	}
}

func (b *bench) business(ctx context.Context, tx *sql.Tx, i int) error {
	_, err := tx.ExecContext(ctx, businessInsert, b.traffic.id(i), b.traffic.key(i), i)
	return err
}

// transactions is a side of transactions that each leave a row.
func (b *bench) transactions(name, count string, one func(ctx context.Context, i int) error) side {
	return side{name: name, n: publishTransactions, run: func(ctx context.Context, n int) (values, error) {
		if err := b.exec(ctx, "empty tables", businessTables, emptyOutbox); err != nil {
			return nil, err
		}
		if err := b.settle(ctx); err != nil {
			return nil, err
		}
		begin := time.Now()
		err := inTurn(ctx, producers, n, one)
		took := time.Since(begin)
		if err != nil {
			return nil, err
		}
		return perSecond(n, took), b.expectRows(ctx, n, count)
	}}
}

// inTurn does n things, as many at a time as there are workers.
func inTurn(ctx context.Context, workers, n int, one func(ctx context.Context, i int) error) error {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			for i := int(next.Add(1) - 1); i < n; i = int(next.Add(1) - 1) {
				if err := one(ctx, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// inTx does by hand what services do.
func inTx(ctx context.Context, db *sql.DB, do func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit()
}
