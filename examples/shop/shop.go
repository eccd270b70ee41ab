package shop

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/outbox"
)

// Shop takes orders.
type Shop struct {
	publisher message.Publisher
	topic     string
	sql       statements
}

// New returns a Shop that keeps its orders in db and publishes to topic through
// box, which must be an outbox on the same db.
func New(db *sql.DB, box *outbox.Outbox, topic string) (*Shop, error) {
	stmts, err := statementsFor(db)
	if err != nil {
		return nil, err
	}
	return &Shop{publisher: box.ContextPublisher(), topic: topic, sql: stmts}, nil
}

// Place stores an order and its message, in the transaction in ctx. It returns false
// for an order that exists already; then it changes and publishes nothing. After an
// error, roll the transaction back. Unless the error is [ErrOrder], the request can
// be repeated unchanged.
func (s *Shop) Place(ctx context.Context, order Order) (bool, error) {
	if err := order.Validate(); err != nil {
		return false, err
	}
	tx, ok := idempotency.TxFromContext(ctx)
	if !ok {
		return false, ErrNoTx
	}
	items, err := json.Marshal(order.Items)
	if err != nil {
		return false, fmt.Errorf("encode items: %w", err)
	}
	result, err := tx.ExecContext(ctx, s.sql.insertOrder,
		order.ID, order.Customer, order.PlacedAt.UTC().Format(time.RFC3339), order.TotalCents(), order.Note)
	if err != nil {
		return false, fmt.Errorf("insert order: %w", err)
	}
	inserted, err := result.RowsAffected()
	if err != nil {
		return false, fmt.Errorf("insert order: %w", err)
	}
	if inserted == 0 {
		return false, nil
	}
	if _, err := tx.ExecContext(ctx, s.sql.insertItems, order.ID, string(items)); err != nil {
		return false, fmt.Errorf("insert items: %w", err)
	}
	return true, s.publish(ctx, tx, order)
}

// publish writes the message into the outbox after nextNumber has locked the
// customer's row. In the reverse order, two orders of one customer could commit in
// another order than their messages are delivered. The message has the same id on
// every attempt of the request.
func (s *Shop) publish(ctx context.Context, tx oncemill.Tx, order Order) error {
	var number int64
	if err := tx.QueryRowContext(ctx, s.sql.nextNumber, order.Customer).Scan(&number); err != nil {
		return fmt.Errorf("number the order: %w", err)
	}
	payload, err := json.Marshal(Placed{Order: order, Number: number})
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	msg := message.NewMessageWithContext(ctx, idempotency.DeriveUUID(ctx, "placed"), payload)
	outbox.SetKey(msg, order.Customer)
	return s.publisher.Publish(s.topic, msg)
}
