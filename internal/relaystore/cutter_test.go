package relaystore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

// cutter stands between database/sql and a driver and loses the connection at a
// statement: before it is sent, or after it was executed, so that its answer is
// lost. It is a driver.Connector.
type cutter struct {
	driver driver.Driver
	dsn    string
	at     atomic.Int64 // statements until the cut; 0: none
	after  atomic.Bool
	cuts   atomic.Int64
}

// errCut looks like what drivers return when the server is gone.
var errCut = &net.OpError{Op: "read", Err: errors.New("cut by the test")}

// cut loses the connection at the n-th statement from now on.
func (c *cutter) cut(n int, after bool) {
	c.after.Store(after)
	c.at.Store(int64(n))
}

func (c *cutter) Driver() driver.Driver { return c.driver }

func (c *cutter) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.driver.Open(c.dsn)
	if err != nil {
		return nil, err
	}
	return &cutConn{DriverConn: testserver.DriverConn{Conn: conn}, cutter: c}, nil
}

func openCut(t testing.TB, d driver.Driver, dsn string) (*sql.DB, *cutter) {
	t.Helper()
	c := &cutter{driver: d, dsn: dsn}
	db := sql.OpenDB(c)
	db.SetMaxIdleConns(8)
	t.Cleanup(func() { db.Close() })
	return db, c
}

type cutConn struct {
	testserver.DriverConn
	cutter *cutter
	gone   bool
}

// through calls send unless the connection is to be lost before, or has been.
func (c *cutConn) through(send func() error) error {
	if c.gone {
		return errCut
	}
	due := c.cutter.at.Load() > 0 && c.cutter.at.Add(-1) == 0
	if due && !c.cutter.after.Load() {
		return c.lose()
	}
	err := send()
	if due && err == nil {
		return c.lose()
	}
	return err
}

func (c *cutConn) lose() error {
	c.gone = true
	c.cutter.cuts.Add(1)
	c.Conn.Close()
	return errCut
}

func (c *cutConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (result driver.Result, err error) {
	err = c.through(func() (err error) {
		result, err = c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
		return err
	})
	return result, err
}

// QueryContext reads the answer to its end before it may be lost: then the
// statement has committed.
func (c *cutConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (rows driver.Rows, err error) {
	last := c.cutter.at.Load() == 1 && c.cutter.after.Load()
	err = c.through(func() (err error) {
		rows, err = c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
		if err != nil || !last {
			return err
		}
		for values := make([]driver.Value, len(rows.Columns())); ; {
			if err := rows.Next(values); errors.Is(err, io.EOF) {
				return rows.Close()
			} else if err != nil {
				return err
			}
		}
	})
	return rows, err
}

func (c *cutConn) BeginTx(ctx context.Context, opts driver.TxOptions) (tx driver.Tx, err error) {
	err = c.through(func() (err error) {
		tx, err = c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
		return err
	})
	if err != nil {
		return nil, err
	}
	return cutTx{tx, c}, nil
}

func (c *cutConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c *cutConn) ResetSession(ctx context.Context) error {
	if c.gone {
		return driver.ErrBadConn
	}
	return c.DriverConn.ResetSession(ctx)
}

func (c *cutConn) IsValid() bool { return !c.gone && c.DriverConn.IsValid() }

func (c *cutConn) Close() error {
	if c.gone {
		return nil
	}
	return c.Conn.Close()
}

type cutTx struct {
	driver.Tx
	conn *cutConn
}

func (t cutTx) Commit() error { return t.conn.through(t.Tx.Commit) }

func (t cutTx) Rollback() error {
	if t.conn.gone {
		return errCut
	}
	return t.Tx.Rollback()
}
