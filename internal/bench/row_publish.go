package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/outbox"
)

const publishTransactions = 6000

const (
	businessTable = `
create table if not exists business (id text primary key, customer text not null, amount bigint not null);
create table if not exists plain_outbox (
	id bigint generated always as identity primary key, topic text not null, message_id text not null,
	key text not null, payload bytea not null, metadata bytea not null, created_at timestamptz not null default now()
);
truncate business, plain_outbox, oncemill.outbox`

	businessInsert = `insert into business (id, customer, amount) values ($1, $2, $3)`
	plainInsert    = `insert into plain_outbox (topic, message_id, key, payload, metadata) values ($1, $2, $3, $4, $5)`
)

// publish measures what the outbox adds to a business transaction, against a
// hand-written INSERT into a plain table.
func publish(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "publish", "tx/s"
	box, err := outbox.New(b.db, outbox.Config{History: outbox.NoHistory, Prepare: true, Logger: b.log})
	if err != nil {
		return nil, err
	}
	ours := b.transactions("ours", `oncemill.outbox`, func(ctx context.Context, i int) error {
		return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			if err := b.business(ctx, tx, i); err != nil {
				return err
			}
			msg := message.NewMessage(b.traffic.id(i), b.traffic.payload(i))
			outbox.SetKey(msg, b.traffic.key(i))
			return box.Publish(ctx, tx, topic, msg)
		})
	})
	plain := b.transactions("plain INSERT", `plain_outbox`, func(ctx context.Context, i int) error {
		tx, err := b.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // a no-op after the commit
		if err := b.business(ctx, tx, i); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, plainInsert, topic, b.traffic.id(i), b.traffic.key(i), b.traffic.payload(i), b.traffic.metadata(i)); err != nil {
			return err
		}
		return tx.Commit()
	})
	v, err := b.rounds(ctx, id, unit, ours, plain)
	if err != nil {
		return nil, err
	}
	return []result{compare(id,
		fmt.Sprintf("%d transactions of one business insert and one message, %d at a time, the statement of the message prepared", publishTransactions, producers),
		"the same with a hand-written INSERT into a plain table", unit, ratioAtLeast(0.9), v[0], v[1])}, nil
}

func (b *bench) business(ctx context.Context, tx *sql.Tx, i int) error {
	_, err := tx.ExecContext(ctx, businessInsert, b.traffic.id(i), b.traffic.key(i), i)
	return err
}

// transactions is a side of so many transactions a second, that each leave a row
// in a table.
func (b *bench) transactions(name, table string, one func(ctx context.Context, i int) error) side {
	return side{name: name, n: publishTransactions, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.exec(ctx, "empty tables", businessTable); err != nil {
			return 0, err
		}
		if err := b.settle(ctx); err != nil {
			return 0, err
		}
		begin := time.Now()
		group, gctx := errgroup.WithContext(ctx)
		for p := range producers {
			group.Go(func() error {
				for i := p; i < n; i += producers {
					if err := one(gctx, i); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return 0, err
		}
		took := time.Since(begin)
		var rows int
		if err := b.db.QueryRowContext(ctx, `select count(*) from `+table).Scan(&rows); err != nil {
			return 0, err
		}
		if rows != n {
			return 0, fmt.Errorf("%d rows of %d transactions", rows, n)
		}
		return perSecond(n, took), nil
	}}
}
