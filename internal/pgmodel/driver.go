package pgmodel

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"syscall"
)

// DB returns a pool of connections to the server. Close it.
func (s *Server) DB() *sql.DB {
	db := sql.OpenDB(connector{s})
	db.SetMaxIdleConns(16)
	return db
}

type connector struct{ server *Server }

func (c connector) Driver() driver.Driver { return c }

func (c connector) Open(string) (driver.Conn, error) { return nil, errors.ErrUnsupported }

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn := &conn{server: c.server}
	if c.server.gone(actorOf(ctx)) {
		return nil, syscall.ECONNREFUSED
	}
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	conn.epoch = c.server.epoch
	return conn, nil
}

// gone reports whether nothing of a process arrives at the server.
func (s *Server) gone(a Actor) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.down || s.dead[a.Process]
}

// knows reports whether a transaction is open. A server that fails ends all.
func (s *Server) knows(tx *Tx) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[tx]
}

// conn is a connection.
type conn struct {
	server *Server
	epoch  int
	broken bool
	tx     *Tx
}

// lose closes the connection. The server notices later.
func (c *conn) lose() error {
	c.broken = true
	if c.tx != nil {
		c.server.abandon(c.tx)
	}
	return io.ErrUnexpectedEOF
}

// do executes a statement.
func (c *conn) do(ctx context.Context, text string, named []driver.NamedValue) ([][]driver.Value, error) {
	s := c.server
	statement, known := s.cfg.Statements[text]
	if strings.HasPrefix(text, "set local ") {
		statement, known = func(*Tx, []any) ([][]driver.Value, error) { return nil, nil }, true
	}
	if !known {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unknown = append(s.unknown, text) // a panic would be taken for one of the handler
		return nil, &Error{"42601"}
	}
	actor := actorOf(ctx)
	if c.broken || s.gone(actor) || c.tx != nil && !s.knows(c.tx) {
		return nil, c.lose()
	}
	if c.tx != nil && c.tx.aborted {
		return nil, errAborted
	}
	what := none
	if !s.cfg.Instant[text] && !strings.HasPrefix(text, "set local ") {
		var ok bool
		if what, ok = s.wait(&Call{Actor: actor, text: text, inside: c.tx != nil}, ctx.Done()); !ok {
			_ = c.lose() // nobody else hears that it is lost
			return nil, ctx.Err()
		}
	}
	if what == lostBefore {
		return nil, c.lose()
	}
	tx := c.tx
	if tx == nil {
		tx = s.begin(actor)
		defer s.rollback(tx) // unless it commits
	}
	tx.text, tx.done = text, ctx.Done()
	args := make([]any, len(named))
	for i := range named {
		args[i] = named[i].Value
	}
	var rows [][]driver.Value
	err := error(&Error{"40001"})
	if what != serialization {
		rows, err = statement(tx, args)
	}
	switch {
	case errors.Is(err, errLost):
		return nil, c.lose()
	case errors.Is(err, errEnded):
		_ = c.lose()
		return nil, ctx.Err()
	case err != nil:
		tx.aborted = true
		return nil, err
	case c.tx == nil:
		err = s.commit(tx)
	}
	if what == lostAfter {
		return nil, c.lose()
	}
	return rows, err
}

// ExecContext implements driver.ExecerContext.
func (c *conn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	rows, err := c.do(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return driver.RowsAffected(len(rows)), nil
}

// QueryContext implements driver.QueryerContext.
func (c *conn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	found, err := c.do(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return &rows{left: found}, nil
}

// BeginTx implements driver.ConnBeginTx.
func (c *conn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	actor := actorOf(ctx)
	if c.broken || c.server.gone(actor) {
		return nil, c.lose()
	}
	c.tx = c.server.begin(actor)
	return c, nil
}

// Commit implements driver.Tx. Like lib/pq's, it does not end with a context.
func (c *conn) Commit() error {
	tx := c.tx
	what, _ := c.server.wait(&Call{Actor: tx.actor, text: "commit", tx: tx}, nil)
	switch what {
	case lostBefore:
		return c.lose()
	case serialization:
		c.server.rollback(tx)
		c.tx = nil
		return &Error{"40001"}
	}
	err := c.server.commit(tx)
	c.tx = nil
	if what == lostAfter {
		return c.lose()
	}
	return err
}

// Rollback implements driver.Tx.
func (c *conn) Rollback() error {
	if !c.broken && !c.server.gone(c.tx.actor) {
		c.server.rollback(c.tx)
	}
	c.tx = nil
	return nil
}

// Ping implements driver.Pinger.
func (c *conn) Ping(ctx context.Context) error {
	if c.broken || c.server.gone(actorOf(ctx)) {
		return driver.ErrBadConn
	}
	return nil
}

// IsValid implements driver.Validator.
func (c *conn) IsValid() bool {
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	return !c.broken && c.epoch == c.server.epoch
}

// ResetSession implements driver.SessionResetter.
func (c *conn) ResetSession(context.Context) error {
	if !c.IsValid() {
		return driver.ErrBadConn
	}
	return nil
}

// CheckNamedValue implements driver.NamedValueChecker: arrays stay what they are.
func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if _, ok := v.Value.(driver.Valuer); ok {
		return nil
	}
	value, err := driver.DefaultParameterConverter.ConvertValue(v.Value)
	v.Value = value
	return err
}

func (c *conn) Begin() (driver.Tx, error)           { return nil, errors.ErrUnsupported }
func (c *conn) Prepare(string) (driver.Stmt, error) { return nil, errors.ErrUnsupported }

// Close ends a transaction that is open.
func (c *conn) Close() error { return nil }

// rows is a result.
type rows struct{ left [][]driver.Value }

// Columns has no names: they are read by position.
func (r *rows) Columns() []string {
	if len(r.left) == 0 {
		return nil
	}
	return make([]string, len(r.left[0]))
}

func (r *rows) Close() error { return nil }

func (r *rows) Next(to []driver.Value) error {
	if len(r.left) == 0 {
		return io.EOF
	}
	copy(to, r.left[0])
	r.left = r.left[1:]
	return nil
}
