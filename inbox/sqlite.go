package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

type sqliteStore struct {
	notes
	claimText string
	sealText  string
	openText  string
}

func newSQLiteStore(db *sql.DB, cfg Config) *sqliteStore {
	return &sqliteStore{
		notes:     notes{db: db, sqlite: true, consumer: cfg.Consumer, text: sqliteNotes.complete(database.Of(cfg.Database))},
		claimText: database.Of(cfg.Database).Expand(sqliteClaim),
		sealText:  database.Of(cfg.Database).Expand(sqliteSeal),
		openText:  database.Of(cfg.Database).Expand(sqliteOpen),
	}
}

// There is one writer, so BEGIN waits for a copy that is being handled, until ctx ends.
// Without a deadline it waits as long as BEGIN waits for a transaction that does not end.
func (s *sqliteStore) begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error) {
	tx, err := boundtx.Begin(ctx, s.db, oncemill.SQLite, calls, nil)
	if err != nil && sqlerr.Retryable(err) {
		return nil, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return tx, err
}

// Served by the primary key (consumer, message_id). It is the first statement of the
// transaction. So a connection that did not begin as a writer becomes one here without
// having read, and waits for its turn.
const sqliteClaim = `
insert into {{inbox}} (consumer, message_id, seal, fingerprint)
values ($1, $2, 1, $3)
on conflict (consumer, message_id) do nothing
returning (select foreign_keys from pragma_foreign_keys)`

func (s *sqliteStore) claim(ctx context.Context, tx *sql.Tx, id messageID, fingerprint []byte) (bool, error) {
	var sealable bool
	err := tx.QueryRowContext(ctx, s.claimText, id.consumer, id.message, fingerprint).Scan(&sealable)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return false, nil
	case err != nil && sqlerr.Retryable(err):
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	case err != nil:
		return false, fmt.Errorf("claim id: %w", err)
	case !sealable:
		return false, ErrUnsealed
	}
	return true, nil
}

// On SQLite statements are function calls, not round trips.
func (s *sqliteStore) claimGroup(ctx context.Context, tx *sql.Tx, sorted []*member) (map[string]bool, error) {
	claimed := make(map[string]bool, len(sorted))
	for _, m := range sorted {
		ok, err := s.claim(ctx, tx, messageID{consumer: s.consumer, message: m.ID}, m.Work.fingerprint)
		if err != nil {
			return nil, err
		}
		if ok {
			claimed[m.ID] = true
		}
	}
	return claimed, nil
}

func (s *sqliteStore) sealGroup(ctx context.Context, tx *sql.Tx, claimed map[string]bool) error {
	for id := range claimed {
		if err := s.seal(ctx, tx, messageID{consumer: s.consumer, message: id}); err != nil {
			return err
		}
	}
	return nil
}

// Served by the primary key. An unsealed row is never committed, so a visible one was
// written by this transaction; none means that the handler has ended it.
const (
	sqliteSeal = `
update {{inbox}}
set seal = null
where consumer = $1
	and message_id = $2
	and seal = 1`
	sqliteOpen = `
select count(*)
from {{inbox}}
where consumer = $1
	and message_id = $2
	and seal = 1`
)

func (s *sqliteStore) seal(ctx context.Context, tx *sql.Tx, id messageID) error {
	return expectOne(tx.ExecContext(ctx, s.sealText, id.consumer, id.message))
}

// SQLite rolls a whole transaction back when a writing statement is interrupted, when the
// disk is full, and where a constraint has "on conflict rollback". Later statements would
// then commit one by one, so the handle must detect it even if the statement's context has
// ended.
func (s *sqliteStore) lost(ctx context.Context, tx *sql.Tx, id messageID, err error) error {
	var open int
	check := tx.QueryRowContext(context.WithoutCancel(ctx), s.openText, id.consumer, id.message).Scan(&open)
	if check != nil || open != 1 {
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	}
	return nil
}
