// Package usagestore counts what the keys of callers take in windows of time: the table
// idempotency_usage.
package usagestore

import (
	"context"
	"database/sql"
	"embed"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

//go:embed migrations postgresql sqlite
var files embed.FS

// Migrations create the table idempotency_usage.
var Migrations = statements.Migrations(files)

// Usage is what a caller has taken in the current window.
type Usage struct {
	Keys  int64
	Bytes int64
	Left  time.Duration // until the window ends
}

// Store counts in one database. It is safe for concurrent use by many processes.
type Store struct {
	text struct{ Add, Purge, Erase string }

	// write runs a short transaction.
	write func(ctx context.Context, kind turn.Kind, do func(tx *sql.Tx) error) error
}

// Open returns the store of a database. It does no I/O.
func Open(db *sql.DB, where database.Database) *Store {
	s := &Store{}
	folder := "postgresql"
	s.write = func(ctx context.Context, _ turn.Kind, do func(tx *sql.Tx) error) error {
		return shorttx.Run(ctx, db, shorttx.Within(ctx), do)
	}
	if where.Dialect == oncemill.SQLite {
		folder = "sqlite"
		s.write = func(ctx context.Context, kind turn.Kind, do func(tx *sql.Tx) error) error {
			return sqlitetx.Write(ctx, db, kind, do)
		}
	}
	statements.Load(&s.text, files, folder, where.Names)
	return s
}

// Add adds to what a caller has taken in the current window of this length, and returns the
// sums. Numbers may be negative; a sum is never.
func (s *Store) Add(ctx context.Context, caller [16]byte, window time.Duration, keys, bytes int64) (u Usage, err error) {
	err = s.write(ctx, turn.Caller, func(tx *sql.Tx) error {
		var left int64
		err := tx.QueryRowContext(ctx, s.text.Add, caller[:], window.Microseconds(), keys, bytes).Scan(&u.Keys, &u.Bytes, &left)
		u.Left = time.Duration(left) * time.Microsecond
		return err
	})
	return u, err
}

// Purge deletes up to limit rows whose window has ended.
func (s *Store) Purge(ctx context.Context, limit int) (deleted int, err error) {
	err = s.write(ctx, turn.Background, func(tx *sql.Tx) error {
		n, err := database.Affected(tx.ExecContext(ctx, s.text.Purge, limit))
		deleted = int(n)
		return err
	})
	if err != nil {
		return 0, err
	}
	return deleted, nil
}

// Erase deletes the counts of a caller. Without the table there are none.
func (s *Store) Erase(ctx context.Context, caller [16]byte) error {
	err := s.write(ctx, turn.Background, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.text.Erase, caller[:])
		return err
	})
	if sqlerr.NoTable(err) {
		return nil
	}
	return err
}
