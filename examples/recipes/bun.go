package recipes

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
)

// Bun uses github.com/uptrace/bun.
type Bun struct {
	DB  *bun.DB
	Box *outbox.Outbox
}

//snippet:bun-open

// OpenBun opens bun on the database that oncemill takes.
func OpenBun(db *sql.DB) *bun.DB { return bun.NewDB(db, pgdialect.New()) }

//snippet:end

//snippet:bun-publish

// Place inserts an order and publishes it.
func (s *Bun) Place(ctx context.Context, order Order) error {
	msg, err := newMessage(order)
	if err != nil {
		return err
	}
	err = s.DB.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if _, err := tx.NewInsert().Model(&order).Exec(ctx); err != nil {
			return err
		}
		return s.Box.Publish(ctx, tx.Tx, "orders", msg) // the *sql.Tx
	})
	if err != nil {
		return err
	}
	s.Box.Wake() // the relay of this process, if there is one; the others poll
	return nil
}

//snippet:end

//snippet:bun-handle

// Reserve is a handler for inbox.Middleware.
func (s *Bun) Reserve(msg *message.Message) error {
	tx, ok := inbox.TxFromContext(msg.Context())
	if !ok {
		return inbox.ErrNoInbox
	}
	order, err := inbox.Decode[Order](inbox.JSON, msg)
	if err != nil {
		return err
	}
	reservation := &Reservation{OrderID: order.ID, Item: order.Item, Quantity: order.Quantity}
	if _, err := s.DB.NewInsert().Conn(tx).Model(reservation).Exec(msg.Context()); err != nil {
		return err
	}
	_, err = s.DB.NewUpdate().Conn(tx).Table("stock").Set("units = units - ?", order.Quantity).
		Where("item = ?", order.Item).Exec(msg.Context())
	return err
}

//snippet:end
