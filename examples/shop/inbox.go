package shop

import (
	"database/sql"
	"log/slog"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// NewInbox returns the inbox of the inventory. A message that cannot be booked, however
// often it comes, becomes a dead letter: oncemill letters shows it.
func NewInbox(db *sql.DB, tables oncemill.Config, logger *slog.Logger) (*inbox.Inbox, error) {
	letters, err := dlq.New(db, dlq.Config{Database: tables})
	if err != nil {
		return nil, err
	}
	return inbox.New(db, inbox.Config{
		Consumer: "inventory", Database: tables, DeadLetters: letters, Logger: logger,
	})
}
