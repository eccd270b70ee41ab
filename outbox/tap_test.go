package outbox_test

import (
	"context"
	"database/sql/driver"
	"strings"
	"sync"

	"github.com/oncemill/oncemill/internal/testserver"
)

// statement is one that was sent to a database.
type statement struct {
	text string
	args []driver.NamedValue
}

// tap stands between database/sql and a driver and notes every statement that is
// sent. It is a driver.Connector.
type tap struct {
	driver driver.Driver
	dsn    string

	mu         sync.Mutex
	statements []statement
	before     func(text string)
}

// onStatement calls fn before each statement is sent; nil ends that.
func (t *tap) onStatement(fn func(text string)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.before = fn
}

// sent returns what was sent since the last call.
func (t *tap) sent() []statement {
	t.mu.Lock()
	defer t.mu.Unlock()
	sent := t.statements
	t.statements = nil
	return sent
}

func (t *tap) note(text string, args ...driver.NamedValue) {
	t.mu.Lock()
	t.statements = append(t.statements, statement{text, args})
	before := t.before
	t.mu.Unlock()
	if before != nil {
		before(text)
	}
}

func (t *tap) Driver() driver.Driver { return tapDriver{t.driver} }

func (t *tap) Connect(context.Context) (driver.Conn, error) {
	conn, err := t.driver.Open(t.dsn)
	if err != nil {
		return nil, err
	}
	return &tapConn{testserver.DriverConn{Conn: conn}, t}, nil
}

// tapDriver is in a package that tells nothing of the dialect.
type tapDriver struct{ driver.Driver }

type tapConn struct {
	testserver.DriverConn
	tap *tap
}

func (c *tapConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.tap.note(query, args...)
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}

func (c *tapConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.tap.note(query, args...)
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
}

func (c *tapConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	c.tap.note("PREPARE " + query)
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c *tapConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	c.tap.note("BEGIN")
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return tapTx{tx, c.tap}, nil
}

type tapTx struct {
	driver.Tx
	tap *tap
}

func (t tapTx) Commit() error {
	t.tap.note("COMMIT")
	return t.Tx.Commit()
}

func (t tapTx) Rollback() error {
	t.tap.note("ROLLBACK")
	return t.Tx.Rollback()
}

// firstWords tells statements apart in a readable way.
func firstWords(statements []statement) string {
	words := make([]string, len(statements))
	for i, s := range statements {
		words[i] = strings.Fields(s.text)[0]
	}
	return strings.Join(words, " ")
}
