package relay_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"io"
	"slices"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// tap stands between database/sql and a driver. Around is called before each
// statement is sent; what it returns is called when the statement has succeeded
// and all its rows are there, and may turn that into a failure: an answer that is
// lost. It is a driver.Connector.
type tap struct {
	driver driver.Driver
	dsn    string
	around func(c *tapConn, text string, args []driver.NamedValue) (after func() error)
}

// tapped returns one more pool on the database, behind a tap.
func (p testDB) tapped(t testing.TB, around func(c *tapConn, text string, args []driver.NamedValue) func() error) *sql.DB {
	t.Helper()
	db := sql.OpenDB(&tap{driver: p.db.Driver(), dsn: p.workerDSN(), around: around})
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func (t *tap) Driver() driver.Driver { return t.driver }

func (t *tap) Connect(context.Context) (driver.Conn, error) {
	conn, err := t.driver.Open(t.dsn)
	if err != nil {
		return nil, err
	}
	return &tapConn{DriverConn: testserver.DriverConn{Conn: conn}, tap: t}, nil
}

type tapConn struct {
	testserver.DriverConn
	tap *tap

	matched bool // a tap's own note
}

func (c *tapConn) run(text string, args []driver.NamedValue, do func() error) error {
	after := c.tap.around(c, text, args)
	if err := do(); err != nil || after == nil {
		return err
	}
	return after()
}

func (c *tapConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (result driver.Result, err error) {
	err = c.run(text, args, func() error {
		result, err = c.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
		return err
	})
	return result, err
}

func (c *tapConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (all driver.Rows, err error) {
	err = c.run(text, args, func() error {
		rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
		if err != nil {
			return err
		}
		all, err = readAll(rows)
		return err
	})
	return all, err
}

func (c *tapConn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	stmt, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	return &tapStmt{stmt, c, text}, nil
}

func (c *tapConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return tapTx{tx, c}, nil
}

type tapStmt struct {
	driver.Stmt
	conn *tapConn
	text string
}

func (s *tapStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (result driver.Result, err error) {
	err = s.conn.run(s.text, args, func() error {
		result, err = s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
		return err
	})
	return result, err
}

func (s *tapStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (all driver.Rows, err error) {
	err = s.conn.run(s.text, args, func() error {
		rows, err := s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
		if err != nil {
			return err
		}
		all, err = readAll(rows)
		return err
	})
	return all, err
}

type tapTx struct {
	driver.Tx
	conn *tapConn
}

// Commit of database/sql comes here, one that is a statement to ExecContext.
func (t tapTx) Commit() error { return t.conn.run("commit", nil, t.Tx.Commit) }

// tapRows are rows that have been read: their statement is over.
type tapRows struct {
	columns []string
	rows    [][]driver.Value
}

func readAll(rows driver.Rows) (*tapRows, error) {
	all := &tapRows{columns: rows.Columns()}
	for {
		values := make([]driver.Value, len(all.columns))
		err := rows.Next(values)
		if err == io.EOF { //nolint:errorlint // the driver's contract
			return all, rows.Close()
		}
		if err != nil {
			_ = rows.Close() // the first error is the one to report
			return nil, err
		}
		for i, v := range values {
			if b, ok := v.([]byte); ok {
				values[i] = slices.Clone(b)
			}
		}
		all.rows = append(all.rows, values)
	}
}

func (r *tapRows) Columns() []string { return r.columns }
func (r *tapRows) Close() error      { return nil }

func (r *tapRows) Next(dest []driver.Value) error {
	if len(r.rows) == 0 {
		return io.EOF
	}
	copy(dest, r.rows[0])
	r.rows = r.rows[1:]
	return nil
}
