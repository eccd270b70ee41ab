package shop

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
)

// ErrNoTx means that there is no transaction in the context. Put inbox.Middleware
// in front of the inventory, and idempotency's TxMiddleware in front of the API.
var ErrNoTx = errors.New("shop: no transaction in the context")

// Inventory books orders: it takes their items from stock and appends them to
// the ledger.
type Inventory struct{ sql statements }

// NewInventory returns an Inventory for the database behind db. It works in the
// transaction of each message, never on db itself.
func NewInventory(db *sql.DB) (*Inventory, error) {
	stmts, err := statementsFor(db)
	if err != nil {
		return nil, err
	}
	return &Inventory{sql: stmts}, nil
}

// Handle is the effect of one message. It is a Watermill message.NoPublishHandlerFunc.
//
// It does not check whether the order was booked before: the inbox in front of it does.
func (inv *Inventory) Handle(msg *message.Message) error {
	ctx := msg.Context()
	tx, ok := oncemill.TxFromContext(ctx)
	if !ok {
		return ErrNoTx
	}
	var placed Placed
	if err := json.Unmarshal(msg.Payload, &placed); err != nil {
		return fmt.Errorf("decode message %s: %w", msg.UUID, err)
	}
	items, err := json.Marshal(placed.Order.Items)
	if err != nil {
		return fmt.Errorf("encode items: %w", err)
	}
	if _, err := tx.ExecContext(ctx, inv.sql.takeStock, string(items)); err != nil {
		return fmt.Errorf("take from stock: %w", err)
	}
	var units int64
	for _, item := range placed.Order.Items {
		units += item.Quantity
	}
	_, err = tx.ExecContext(ctx, inv.sql.appendLedger, msg.UUID, placed.Order.ID, placed.Order.Customer, placed.Number, units)
	if err != nil {
		return fmt.Errorf("append to ledger: %w", err)
	}
	return nil
}
