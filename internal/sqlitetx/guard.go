package sqlitetx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"reflect"

	"github.com/oncemill/oncemill/internal/bounded"
)

// BeginTx begins a transaction for a caller's statements. It ends with Commit or Release,
// not with ctx.
//
// SQLite rolls back the whole transaction when a writing statement is interrupted, when
// the disk is full, and for constraints with "on conflict rollback". Neither SQLite nor
// database/sql refuses further statements: each of them then commits by itself. So until
// Commit is called, a hook of the driver turns every commit on the connection into a
// rollback, and its statement fails.
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

// hookCommits calls allowed before each commit on a connection; nil removes the hook. It
// does nothing with a driver that has no such hook, or whose wrapper hides it for want of
// a Raw method.
//
// It uses reflection, since an import would register the driver in every program:
// modernc.org/sqlite takes a func() int32, mattn/go-sqlite3 a func() int.
func hookCommits(conn *sql.Conn, allowed func() bool) {
	_ = bounded.Raw(conn, func(driverConn any) error { // fails if the connection is gone
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

// rawer is a connection that wraps another one, as otelsql's do.
type rawer interface{ Raw() driver.Conn }
