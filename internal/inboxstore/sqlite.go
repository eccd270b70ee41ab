package inboxstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

type sqlite struct {
	store
	text sqliteTexts
}

type sqliteTexts struct {
	texts
	Claim, Seal, Unsealed string
}

func newSQLite(db *sql.DB, where database.Database, cfg Config) *sqlite {
	s := &sqlite{}
	statements.Load(&s.text, files, "sqlite", where.Names)
	s.store = store{
		db: db, consumer: cfg.Consumer, text: &s.text.texts,
		write: func(ctx context.Context, kind turn.Kind, do func(session) error) error {
			return sqlitetx.Write(ctx, db, kind, func(tx *sql.Tx) error { return do(tx) })
		},
		inTx: func(ctx context.Context, do func(*sql.Tx) error) error {
			return sqlitetx.Write(ctx, db, turn.Caller, do)
		},
		list: func(list []string) any {
			encoded, _ := json.Marshal(list) // strings cannot fail
			return string(encoded)
		},
	}
	return s
}

// There is one writer, so BEGIN waits for a copy that is being handled, until ctx ends.
// Without a deadline it waits as long as BEGIN waits for a transaction that does not end.
func (s *sqlite) Begin(ctx context.Context, calls *bounded.Calls) (*boundtx.Tx, error) {
	tx, err := boundtx.Begin(ctx, s.db, oncemill.SQLite, calls, nil)
	return tx, elsewhere(err)
}

func (s *sqlite) Claim(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (bool, error) {
	var sealable bool
	err := tx.QueryRowContext(ctx, s.text.Claim, s.consumer, id, fingerprint).Scan(&sealable)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return false, nil
	case err != nil && sqlerr.Retryable(err):
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	case err != nil:
		return false, fmt.Errorf("claim: %w", err)
	case !sealable:
		return false, ErrUnsealed
	}
	return true, nil
}

// Statements are function calls here, not round trips.
func (s *sqlite) ClaimGroup(ctx context.Context, tx *sql.Tx, sorted []Claim) (map[string]bool, error) {
	claimed := make(map[string]bool, len(sorted))
	for _, c := range sorted {
		ok, err := s.Claim(ctx, tx, c.ID, c.Fingerprint)
		if err != nil {
			return nil, err
		}
		if ok {
			claimed[c.ID] = true
		}
	}
	return claimed, nil
}

func (s *sqlite) Seal(ctx context.Context, tx *sql.Tx, id string) error {
	return seal(tx.ExecContext(ctx, s.text.Seal, s.consumer, id))
}

func (s *sqlite) SealGroup(ctx context.Context, tx *sql.Tx, claimed map[string]bool) error {
	for id := range claimed {
		if err := s.Seal(ctx, tx, id); err != nil {
			return err
		}
	}
	return nil
}

// The connection's busy timeout limits the wait for locks.
func (s *sqlite) LimitLockWait(context.Context, *sql.Tx) error { return nil }

// SQLite rolls a whole transaction back when a writing statement is interrupted, when the
// disk is full, and where a constraint has "on conflict rollback". Later statements would
// then commit one by one, so EndedBy must detect it even if the statement's context has
// ended.
func (s *sqlite) EndedBy(ctx context.Context, tx *sql.Tx, id string, err error) error {
	var unsealed int
	check := tx.QueryRowContext(context.WithoutCancel(ctx), s.text.Unsealed, s.consumer, id).Scan(&unsealed)
	if check != nil || unsealed != 1 {
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	}
	return nil
}

// The database is a file: a connection to it is not lost.
func (s *sqlite) ConnectionLost(context.Context, *sql.Tx) bool { return false }

// Writers is 1.
func (s *sqlite) Writers() int { return 1 }
