package inbox

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill"
)

// store is what a database does for an inbox. An attempt is begin, claim, the
// handler's statements, seal, and the commit.
type store interface {
	begin(ctx context.Context) (*sql.Tx, error)

	// claim inserts the id. False means that a committed transaction has it.
	// It waits for another transaction that holds the id, but not for long: then
	// the error is ErrBeingHandled.
	claim(ctx context.Context, tx *sql.Tx, id messageID) (bool, error)

	// seal allows the database to commit. It is the last statement, and fails
	// with ErrTxEnded if tx is not the transaction that claimed the id.
	seal(ctx context.Context, tx *sql.Tx, id messageID) error

	// claimGroup inserts the ids, which are sorted and all different, for one
	// transaction that does the work of a group, and returns those that no
	// committed transaction has. Any lock in this transaction is waited for at
	// most as long as the group's lock timeout says.
	claimGroup(ctx context.Context, tx *sql.Tx, ids []string) (claimed map[string]bool, err error)

	// sealGroup is seal for what claimGroup claimed.
	sealGroup(ctx context.Context, tx *sql.Tx, claimed map[string]bool) error

	// lost tells whether a statement of the handler that failed with err has
	// taken the transaction with it: nil if not.
	lost(ctx context.Context, tx *sql.Tx, id messageID, err error) error
}

// messageID is the key of the inbox.
type messageID struct {
	consumer string
	message  string
}

func newStore(db *sql.DB, cfg Config) store {
	if cfg.Database.Dialect == oncemill.SQLite {
		return newSQLiteStore(db, cfg)
	}
	return newPostgresStore(db, cfg)
}

// expectOne turns the result of a seal into its error.
func expectOne(result sql.Result, err error) error {
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	sealed, err := result.RowsAffected()
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	if sealed != 1 {
		return ErrTxEnded
	}
	return nil
}
