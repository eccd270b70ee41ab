package inbox_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"

	"github.com/oncemill/oncemill/internal/testserver"
)

// tap stands between database/sql and a driver. It notes every statement that is
// sent and can send another in its place, which no handle can see.
type tap struct {
	driver driver.Driver
	dsn    string

	mu         sync.Mutex
	statements []string
	rewrites   map[string]string
	committed  func(error) error // what the driver says after a commit
	away       bool              // the server cannot be reached
}

// goAway makes the server unreachable, or reachable again.
func (t *tap) goAway(away bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.away = away
}

func (t *tap) isAway() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.away
}

// unreachable is what a dial returns.
var unreachable = &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}

// sent returns what was sent since the last call.
func (t *tap) sent() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	sent := t.statements
	t.statements = nil
	return sent
}

// rewrite sends other wherever text is to be sent.
func (t *tap) rewrite(text, other string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rewrites == nil {
		t.rewrites = map[string]string{}
	}
	t.rewrites[text] = other
}

func (t *tap) pass(text string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if other, ok := t.rewrites[text]; ok {
		text = other
	}
	// What precedes each turn to write on SQLite is not the inbox's, and what is paused is read
	// once a second, whatever is delivered.
	if !strings.Contains(text, "pauses") && !strings.HasPrefix(text, "pragma ") && !strings.HasPrefix(text, "select file from pragma_") {
		t.statements = append(t.statements, text)
	}
	return text
}

func (t *tap) Driver() driver.Driver { return t.driver }

func (t *tap) Connect(context.Context) (driver.Conn, error) {
	if t.isAway() {
		return nil, unreachable
	}
	conn, err := t.driver.Open(t.dsn)
	if err != nil {
		return nil, err
	}
	return &tapConn{testserver.DriverConn{Conn: conn}, t}, nil
}

type tapConn struct {
	testserver.DriverConn
	tap *tap
}

func (c *tapConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if c.tap.isAway() {
		return nil, driver.ErrBadConn
	}
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, c.tap.pass(query), args)
}

func (c *tapConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if c.tap.isAway() {
		return nil, driver.ErrBadConn
	}
	return c.Conn.(driver.QueryerContext).QueryContext(ctx, c.tap.pass(query), args)
}

func (c *tapConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	stmt, err := c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, c.tap.pass(query))
	if err != nil {
		return nil, err
	}
	return tapStmt{stmt, c.tap}, nil
}

// tapStmt notes the end of a prepared statement.
type tapStmt struct {
	driver.Stmt
	tap *tap
}

func (s tapStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

func (s tapStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

func (s tapStmt) Close() error {
	s.tap.pass(closeStatement)
	return s.Stmt.Close()
}

const closeStatement = "CLOSE"

func (c *tapConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if c.tap.isAway() {
		return nil, driver.ErrBadConn
	}
	c.tap.pass("BEGIN")
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
	t.tap.pass("COMMIT")
	err := t.Tx.Commit()
	t.tap.mu.Lock()
	defer t.tap.mu.Unlock()
	if t.tap.committed != nil {
		return t.tap.committed(err)
	}
	return err
}

func (t tapTx) Rollback() error {
	t.tap.pass("ROLLBACK")
	return t.Tx.Rollback()
}

// firstWords makes statements readable in a failure and comparable.
func firstWords(statements []string) []string {
	short := slices.Clone(statements)
	for i, s := range short {
		short[i] = strings.Join(strings.Fields(s)[:1], " ")
	}
	return short
}
