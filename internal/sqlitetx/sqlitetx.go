// Package sqlitetx runs transactions on SQLite: writers in their turn, readers beside
// them, whatever kind the data source name says.
package sqlitetx

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/turn"
)

// Writer is a connection whose turn it is to write.
type Writer struct {
	Conn       *sql.Conn
	turn       *turn.Turn
	tx         *sql.Tx     // nil: none
	committing atomic.Bool // it may commit
	release    sync.Once
}

// Acquire waits for the turn, and then for a connection, until ctx ends. At the first
// use of db it looks at its settings, and always that its file is the one it was; the
// errors are an *oncemill.ConfigError, oncemill.ErrDatabaseReplaced,
// oncemill.ErrNestedTx, oncemill.ErrDatabaseLocked and those of the database.
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

// Release rolls back the transaction of BeginTx, unless it has ended, waits for the end of the
// connection's *sql.Tx, if it has one, and gives connection and turn back. To call it
// again only waits.
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

// Write runs fn in a transaction that is a writer from its start. An error of fn rolls
// it back. What fn does must be short: there is one writer.
func Write(ctx context.Context, db *sql.DB, kind turn.Kind, fn func(tx *sql.Tx) error) error {
	return write(ctx, db, kind, func(tx *sql.Tx, _ func() bool) error { return fn(tx) })
}

// WriteSlices runs fn in transactions of the background, one after the other, until it
// reports that nothing more is to be done. fn asks over before each piece of work, and
// returns with more to do when that says yes: others wait for the turn. The first answer
// in each transaction is no, so that each does something, however long its beginning
// took. What was committed stays when a later call fails.
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

func write(ctx context.Context, db *sql.DB, kind turn.Kind, fn func(tx *sql.Tx, over func() bool) error) error {
	w, err := Acquire(ctx, db, kind)
	if err != nil {
		return err
	}
	defer w.Release()
	// Neither begins nor ends under ctx: what was interrupted may have taken effect.
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

// Read runs fn in a transaction that sees one state of the database and waits for no
// writer. fn must not write.
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
