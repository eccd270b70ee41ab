package sqlitetx_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/internal/turn"
)

// losses are the ways in which SQLite itself ends a transaction.
var losses = map[string]func(t *testing.T, tx *sql.Tx) error{
	"a constraint says so": func(t *testing.T, tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), `insert or rollback into names values ('taken')`)
		return err
	},
	"a statement is interrupted": func(t *testing.T, tx *sql.Tx) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		interrupts.Store(t.Name(), cancel)
		_, err := tx.ExecContext(ctx, `insert into names with recursive n(i) as (select interrupt_now($1) union all select i + 1 from n) select 'x' || i from n`, t.Name())
		return err
	},
}

// interrupts cancel the statements of tests, by the names of those, once they run: one that has not begun loses nothing.
var interrupts sync.Map

func TestMain(m *testing.M) {
	sqlite.MustRegisterScalarFunction("interrupt_now", 1, func(_ *sqlite.FunctionContext, args []driver.Value) (driver.Value, error) {
		cancel, ok := interrupts.Load(args[0])
		if !ok {
			return nil, errors.New("nothing to cancel")
		}
		cancel.(context.CancelFunc)()
		return int64(1), nil
	})
	os.Exit(m.Run())
}

func TestBeginTx_NothingCommitsAloneWhenTheTransactionIsLost(t *testing.T) {
	t.Parallel()
	for name, lose := range losses {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			w, tx := begin(t, db)
			ahead, err := tx.PrepareContext(t.Context(), `insert into names values ('prepared before')`)
			if err != nil {
				t.Fatal(err)
			}
			if err := lose(t, tx); err == nil {
				t.Fatal("nothing was lost")
			}
			if _, err := ahead.ExecContext(t.Context()); err == nil {
				t.Error("a prepared statement succeeded")
			}
			if _, err := tx.ExecContext(t.Context(), `insert into names values ('executed')`); err == nil {
				t.Error("a statement succeeded")
			}
			if err := w.Commit(); err == nil {
				t.Error("it was committed")
			}
			w.Release()
			expectNames(t, db, 1)
			usable(t, db)
		})
	}
}

// The hook also works behind a wrapper with a Raw method.
func TestBeginTx_FindsTheHookBehindAWrapper(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	fill(t, testserver.OpenSQLite(t, path))
	db := sql.OpenDB(wrapper{dsn: oncemill.SQLiteDSN(path)})
	defer db.Close()
	w, tx := begin(t, db)
	if err := losses["a constraint says so"](t, tx); err == nil {
		t.Fatal("nothing was lost")
	}
	if _, err := tx.ExecContext(t.Context(), `insert into names values ('alone')`); err == nil {
		t.Error("a statement succeeded")
	}
	w.Release()
	expectNames(t, db, 1)
	usable(t, db)
}

// wrapper is a driver like those for tracing.
type wrapper struct{ dsn string }

type wrapped struct{ driver.Conn }

func (w wrapper) Connect(context.Context) (driver.Conn, error) {
	conn, err := (&sqlite.Driver{}).Open(w.dsn)
	return wrapped{conn}, err
}

func (wrapper) Driver() driver.Driver { return &sqlite.Driver{} }
func (w wrapped) Raw() driver.Conn    { return w.Conn }
func (w wrapped) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	return w.Conn.(driver.ConnBeginTx).BeginTx(ctx, options)
}

// Release of a lost transaction runs while its statements run.
func TestRelease_LetsNoStatementCommit(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for range 200 {
		w, tx := begin(t, db)
		if err := losses["a constraint says so"](t, tx); err == nil {
			t.Fatal("nothing was lost")
		}
		stmt, err := tx.PrepareContext(t.Context(), `insert into names values ('alone')`)
		if err != nil {
			t.Fatal(err)
		}
		began := make(chan struct{})
		var running sync.WaitGroup
		running.Go(func() {
			close(began)
			for range 20 {
				if _, err := stmt.ExecContext(t.Context()); err == nil {
					t.Error("a statement succeeded")
				}
			}
		})
		<-began
		running.Go(w.Release)
		running.Go(w.Release)
		running.Wait()
	}
	expectNames(t, db, 1)
	usable(t, db)
}

func newDatabase(t *testing.T) *sql.DB {
	t.Helper()
	db := testserver.SQLite(t)
	fill(t, db)
	return db
}

func fill(t *testing.T, db *sql.DB) {
	t.Helper()
	for _, text := range []string{`create table names (name text primary key)`, `insert into names values ('taken')`} {
		if _, err := db.ExecContext(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
}

func begin(t *testing.T, db *sql.DB) (*sqlitetx.Writer, *sql.Tx) {
	t.Helper()
	w, err := sqlitetx.Acquire(t.Context(), db, turn.Caller)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := w.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return w, tx
}

func expectNames(t *testing.T, db *sql.DB, want int) {
	t.Helper()
	var n int
	if err := db.QueryRowContext(t.Context(), `select count(*) from names`).Scan(&n); err != nil || n != want {
		t.Errorf("%d names, want %d: %v", n, want, err)
	}
}

// usable expects that the connections can commit again, through sqlitetx and without it.
func usable(t *testing.T, db *sql.DB) {
	t.Helper()
	w, tx := begin(t, db)
	if _, err := tx.ExecContext(t.Context(), `insert into names values ('in turn')`); err != nil {
		t.Error(err)
	}
	if err := w.Commit(); err != nil {
		t.Error(err)
	}
	w.Release()
	if _, err := db.ExecContext(t.Context(), `insert into names values ('by hand')`); err != nil {
		t.Error(err)
	}
	expectNames(t, db, 3)
}

// Each transaction makes progress, even if its BEGIN used up its time.
func TestWriteSlices_MakesProgressInEachTransaction(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	const rows, most = 3, 30
	done, transactions := 0, 0
	err := sqlitetx.WriteSlices(t.Context(), db, func(_ *sql.Tx, over func() bool) (more bool, err error) {
		transactions++
		time.Sleep(300 * time.Millisecond) // longer than a slice
		for ; done < rows && !over(); done++ {
		}
		return done < rows && transactions < most, nil
	})
	if err != nil || done < rows || transactions < rows {
		t.Errorf("%d of %d done in %d transactions, %v", done, rows, transactions, err)
	}
}
