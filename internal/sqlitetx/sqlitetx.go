// Package sqlitetx runs transactions on SQLite: writers take turns, readers run beside
// them. The data source name's transaction mode does not matter.
package sqlitetx

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/turn"
)

// Writer is a connection that has the turn to write.
type Writer struct {
	Conn       *sql.Conn
	turn       *turn.Turn
	tx         *sql.Tx     // of BeginTx, or nil
	committing atomic.Bool // Commit was called
	release    sync.Once
}

// Acquire waits for the turn, and then for a connection, until ctx ends. It checks the
// settings of db at its first use, and each time that its file was not replaced. The
// errors are *oncemill.ConfigError, oncemill.ErrDatabaseReplaced, oncemill.ErrNestedTx,
// oncemill.ErrDatabaseLocked and those of the database.
func Acquire(ctx context.Context, db *sql.DB, kind turn.Kind) (*Writer, error) {
	turns := turn.Of(db)
	held, err := turns.Take(ctx, kind)
	if err != nil {
		return nil, err
	}
	w := &Writer{turn: held}
	if err := w.prepare(ctx, db, turns); err != nil {
		w.Release()
		return nil, err
	}
	return w, nil
}

func (w *Writer) prepare(ctx context.Context, db *sql.DB, turns *turn.Turns) (err error) {
	if !turns.Checked() {
		if err := oncemill.CheckSQLite(ctx, db); err != nil {
			return err
		}
	}
	if w.Conn, err = db.Conn(ctx); err != nil {
		return err
	}
	return turns.CheckFile(ctx, w.Conn)
}

// Release rolls back the transaction of BeginTx, unless it has ended, waits for the end of
// the connection's *sql.Tx, and gives back the connection and the turn. Further calls only
// wait.
func (w *Writer) Release() {
	w.release.Do(func() {
		if w.tx != nil {
			_ = w.tx.Rollback() // a no-op after Commit
			hookCommits(w.Conn, nil)
		}
		if w.Conn != nil {
			_ = w.Conn.Close() // only returns it to the pool
		}
		w.turn.Give()
	})
}

// Write runs fn in a transaction that is a writer from its start. An error of fn rolls it
// back. fn must be short, since all other writers wait for it.
func Write(ctx context.Context, db *sql.DB, kind turn.Kind, fn func(tx *sql.Tx) error) error {
	return write(ctx, db, kind, func(tx *sql.Tx, _ func() bool) error { return fn(tx) })
}

// WriteSlices runs fn in background transactions, one after the other, until it reports
// that there is no more to do. fn calls over before each piece of work and returns when
// over returns true, since others wait for the turn. The first call in each transaction
// returns false, so that each transaction makes progress however long its BEGIN took.
// Committed work stays if a later call fails.
func WriteSlices(ctx context.Context, db *sql.DB, fn func(tx *sql.Tx, over func() bool) (more bool, err error)) error {
	for more := true; more; {
		err := write(ctx, db, turn.Background, func(tx *sql.Tx, over func() bool) (err error) {
			asked := false
			more, err = fn(tx, func() bool {
				first := !asked
				asked = true
				return !first && over()
			})
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// DeleteSlices deletes a number of rows at a time, like [WriteSlices], until del deletes fewer.
// It returns how many rows are deleted, also with an error.
func DeleteSlices(ctx context.Context, db *sql.DB, some int64, del func(tx *sql.Tx) (int64, error)) (deleted int64, err error) {
	slice := int64(0) // deleted by the last transaction
	err = WriteSlices(ctx, db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		deleted, slice = deleted+slice, 0
		for !over() {
			n, err := del(tx)
			slice += n
			if err != nil || n < some {
				return false, err
			}
		}
		return true, nil
	})
	if err != nil {
		return deleted, err
	}
	return deleted + slice, nil
}

func write(ctx context.Context, db *sql.DB, kind turn.Kind, fn func(tx *sql.Tx, over func() bool) error) error {
	w, err := Acquire(ctx, db, kind)
	if err != nil {
		return err
	}
	defer w.Release()
	// BEGIN and COMMIT do not run under ctx: an interrupted one may have taken effect.
	var tx *sql.Tx
	err = w.turn.Begin(ctx, w.Conn, func(whole context.Context) (err error) {
		tx, err = w.Conn.BeginTx(whole, nil)
		return err
	})
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if err := fn(tx, w.turn.Over); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return tx.Commit()
}

// Read runs fn in a transaction that sees one snapshot and does not wait for writers. fn
// must not write.
func Read(ctx context.Context, db *sql.DB, fn func(conn *sql.Conn) error) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // returns the connection to the pool
	whole := context.WithoutCancel(ctx)
	if _, err := conn.ExecContext(whole, `begin deferred`); err != nil {
		return err
	}
	defer conn.ExecContext(whole, `rollback`) //nolint:errcheck // there is nothing to lose
	return fn(conn)
}
