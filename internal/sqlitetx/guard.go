package sqlitetx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"reflect"
)

// BeginTx begins a transaction in which somebody else runs statements. It does not end with
// ctx, but by Commit or Release.
//
// SQLite rolls a whole transaction back on its own when a statement that writes is
// interrupted, when the disk is full, and where a constraint says "on conflict rollback".
// Neither SQLite nor database/sql refuses what comes next: each statement then commits by
// itself. So until Commit is called nothing commits on the connection: a hook of the
// driver turns every commit there into a rollback, and its statement fails.
func (w *Writer) BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error) {
	err := w.turn.Begin(ctx, w.Conn, func(whole context.Context) (err error) {
		w.tx, err = w.Conn.BeginTx(whole, options)
		return err
	})
	if err != nil {
		return nil, err
	}
	w.turn.Runs(w.tx)
	hookCommits(w.Conn, w.committing.Load)
	return w.tx, nil
}

// Commit commits the transaction of BeginTx.
func (w *Writer) Commit() error {
	w.committing.Store(true)
	return w.tx.Commit()
}

// hookCommits has allowed asked before each commit on a connection; nil: nobody is asked.
// Without such a hook (of another driver, or hidden by one that wraps it and has no Raw
// method to show it) nothing is done.
//
// The drivers' types are not imported, which would register a driver in every program:
// modernc.org/sqlite takes a func() int32, mattn/go-sqlite3 a func() int.
func hookCommits(conn *sql.Conn, allowed func() bool) {
	_ = conn.Raw(func(driverConn any) error { // it fails where the connection is gone
		for wrapper, ok := driverConn.(rawer); ok; wrapper, ok = driverConn.(rawer) {
			driverConn = wrapper.Raw()
		}
		register := reflect.ValueOf(driverConn).MethodByName("RegisterCommitHook")
		if !register.IsValid() {
			return nil
		}
		kind := register.Type().In(0)
		hook := reflect.Zero(kind)
		if allowed != nil {
			hook = reflect.MakeFunc(kind, func([]reflect.Value) []reflect.Value {
				refused := reflect.New(kind.Out(0)).Elem()
				if !allowed() {
					refused.SetInt(1)
				}
				return []reflect.Value{refused}
			})
		}
		register.Call([]reflect.Value{hook})
		return nil
	})
}

// rawer is a connection that wraps another one, as those of otelsql do.
type rawer interface{ Raw() driver.Conn }
