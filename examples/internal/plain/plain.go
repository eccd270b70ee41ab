// Package plain is what consumers do without an inbox: a transaction for each
// message, acknowledged after its commit. A message that comes twice has its
// effect twice. The examples use it to show that their check sees that.
package plain

import (
	"database/sql"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
)

// Transaction returns a Watermill middleware that runs each handler in a
// transaction of db.
func Transaction(db *sql.DB) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			ctx := msg.Context()
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return nil, fmt.Errorf("begin: %w", err)
			}
			defer tx.Rollback() //nolint:errcheck // after Commit it has nothing to do, before it the error in hand matters more
			msg.SetContext(oncemill.ContextWithTx(ctx, tx))
			produced, err := h(msg)
			msg.SetContext(ctx)
			if err != nil {
				return nil, err
			}
			if err := tx.Commit(); err != nil {
				return nil, fmt.Errorf("commit: %w", err)
			}
			return produced, nil
		}
	}
}
