package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
)

// limited returns a message that has so much time.
func limited(t *testing.T, id string, d time.Duration) *message.Message {
	ctx, cancel := context.WithTimeout(inbox.ContextWithDelivery(t.Context(), delivery{}), d)
	t.Cleanup(cancel)
	return message.NewMessageWithContext(ctx, id, nil)
}

// keepRows does something while it uses the bytes of a row, which belong to the driver.
func keepRows(m *message.Message, do func()) error {
	tx, _ := inbox.TxFromContext(m.Context())
	rows, err := tx.QueryContext(m.Context(), `select '1' union all select '2'`)
	if err != nil {
		return err
	}
	defer rows.Close()
	var raw sql.RawBytes
	if rows.Next() {
		err = rows.Scan(&raw)
	}
	do()
	return errors.Join(err, errUndo)
}
