package recipes

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/recipes/stockpgx"
	"github.com/oncemill/oncemill/examples/recipes/stocksql"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/pgxtx"
)

// SQLC uses sqlc's code for database/sql.
type SQLC struct {
	DB  *sql.DB
	Box *outbox.Outbox
}

//snippet:sqlc-publish

// Place inserts an order and publishes it. If a transaction lost against another one,
// RunInTx runs the function again.
func (s *SQLC) Place(ctx context.Context, order Order) error {
	msg, err := newMessage(order)
	if err != nil {
		return err
	}
	return s.Box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := stocksql.New(tx).AddOrder(ctx, stocksql.AddOrderParams(order)); err != nil {
			return err
		}
		return s.Box.Publish(ctx, tx, "orders", msg)
	})
}

//snippet:end

//snippet:sqlc-handle

// Reserve is a handler for inbox.Middleware.
func (s *SQLC) Reserve(msg *message.Message) error {
	tx, ok := inbox.TxFromContext(msg.Context())
	if !ok {
		return inbox.ErrNoInbox
	}
	order, err := inbox.Decode[Order](inbox.JSON, msg)
	if err != nil {
		return err
	}
	queries := stocksql.New(tx)
	reservation := stocksql.AddReservationParams{OrderID: order.ID, Item: order.Item, Quantity: order.Quantity}
	if err := queries.AddReservation(msg.Context(), reservation); err != nil {
		return err
	}
	return queries.TakeUnits(msg.Context(), stocksql.TakeUnitsParams{Item: order.Item, Quantity: order.Quantity})
}

//snippet:end

// SQLCPgx uses sqlc's code for pgx/v5.
type SQLCPgx struct {
	Pool *pgxpool.Pool
	Box  *outbox.Outbox
}

//snippet:sqlc-pgx-publish

// Place inserts an order and publishes it.
func (s *SQLCPgx) Place(ctx context.Context, order Order) error {
	msg, err := newMessage(order)
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		if err := stockpgx.New(tx).AddOrder(ctx, stockpgx.AddOrderParams(order)); err != nil {
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

//snippet:sqlc-pgx-handle

// Reserve is a handler for inbox.Middleware.
func (s *SQLCPgx) Reserve(msg *message.Message) error {
	tx, err := pgxtx.FromContext(msg.Context())
	if err != nil {
		return err
	}
	order, err := inbox.Decode[Order](inbox.JSON, msg)
	if err != nil {
		return err
	}
	queries := stockpgx.New(tx)
	_, err = queries.AddReservations(msg.Context(), []stockpgx.AddReservationsParams{
		{OrderID: order.ID, Item: order.Item, Quantity: order.Quantity},
	})
	if err != nil {
		return err
	}
	return queries.TakeUnits(msg.Context(), stockpgx.TakeUnitsParams{Item: order.Item, Quantity: order.Quantity})
}

//snippet:end
