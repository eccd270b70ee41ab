package recipes

import (
	"context"
	"database/sql"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/pgxtx"
)

//snippet:pgxpool-open

// OpenPgxPool opens a pool, and the database that oncemill takes, which uses the pool's
// connections. Close both, the database first.
func OpenPgxPool(ctx context.Context, url string) (*pgxpool.Pool, *sql.DB, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, nil, err
	}
	cfg.PingTimeout = time.Second // of an idle connection: its server may be frozen
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	return pool, stdlib.OpenDBFromPool(pool), nil
}

//snippet:end

// PgxPool uses pgx's own interface.
type PgxPool struct {
	Pool *pgxpool.Pool
	Box  *outbox.Outbox
}

//snippet:pgxpool-publish

// Place inserts an order and publishes it.
func (s *PgxPool) Place(ctx context.Context, order Order) error {
	msg, err := newMessage(order)
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into orders (id, item, quantity) values ($1, $2, $3)`, order.ID, order.Item, order.Quantity)
		if err != nil {
			return err
		}
		return s.Box.Publish(ctx, oncemill.FromPgx(tx), "orders", msg)
	})
	if err != nil {
		return err
	}
	s.Box.Wake() // the relay of this process, if there is one; the others poll
	return nil
}

//snippet:end

//snippet:pgxpool-handle

// Reserve is a handler for inbox.Middleware.
func (s *PgxPool) Reserve(msg *message.Message) error {
	ctx := msg.Context()
	tx, err := pgxtx.FromContext(ctx)
	if err != nil {
		return err
	}
	order, err := inbox.Decode[Order](inbox.JSON, msg)
	if err != nil {
		return err
	}
	batch := new(pgx.Batch)
	batch.Queue(`insert into reservations (order_id, item, quantity) values ($1, $2, $3)`, order.ID, order.Item, order.Quantity)
	batch.Queue(`update stock set units = units - $2 where item = $1`, order.Item, order.Quantity)
	return tx.SendBatch(ctx, batch).Close()
}

//snippet:end
