package bounded

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"sync"

	"github.com/lib/pq"
)

// Line is the connection that a call waits on, with a driver that goes on waiting when
// the call has been given up. lib/pq reads until the server answers, and until then the
// connection has its place in the pool: a server that is silent would use the pool up. So
// the connection of an abandoned call is closed, which ends the read.
//
// That is safe beside the read: lib/pq's Close sends a message and closes the socket, and
// shares nothing else with it. And it meets no other call: while a connection can be
// closed it is not in the pool.
//
// The zero value is a line without a connection.
type Line struct {
	mu     sync.Mutex // guards what follows
	conn   *sql.Conn
	socket io.Closer // of conn
	busy   bool      // with a transaction
	down   bool
}

// statements are what *sql.DB and *sql.Conn have in common.
type statements interface {
	BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
	PingContext(ctx context.Context) error
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// on calls f for the line's connection, or for the pool: without a line, or with a driver
// that stops waiting by itself. As database/sql does, it tries
// another connection when the server had closed one before it was used.
func on[T any](ctx context.Context, l *Line, db *sql.DB, f func(statements) (T, error)) (T, error) {
	var none T
	if _, waits := db.Driver().(*pq.Driver); l == nil || !waits {
		return f(db)
	}
	for range 2 {
		conn, err := l.take(ctx, db)
		if err != nil {
			return none, err
		}
		v, err := f(conn)
		if !errors.Is(err, driver.ErrBadConn) {
			return v, err
		}
		l.Close()
	}
	return f(db)
}

// take returns the line's connection, at first one of the pool.
func (l *Line) take(ctx context.Context, db *sql.DB) (*sql.Conn, error) {
	l.mu.Lock()
	conn := l.conn
	l.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	var socket io.Closer
	_ = conn.Raw(func(c any) error { socket, _ = c.(io.Closer); return nil }) // fails for a connection that is bad, which is found soon
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		_ = conn.Close() // to the pool
		return nil, ErrAbandoned
	}
	l.conn, l.socket = conn, socket
	return conn, nil
}

// BeginTx begins a transaction on the line. Until it is closed, nothing else goes over it.
func (l *Line) BeginTx(ctx context.Context, db *sql.DB, options *sql.TxOptions) (*sql.Tx, error) {
	tx, err := on(ctx, l, db, func(s statements) (*sql.Tx, error) { return s.BeginTx(ctx, options) })
	if err == nil && l != nil {
		l.mu.Lock()
		l.busy = true
		l.mu.Unlock()
	}
	return tx, err
}

// Close waits for the end of what goes over the line, and gives the connection back.
func (l *Line) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	conn, down := l.conn, l.down
	l.conn, l.socket, l.busy = nil, nil, false
	l.mu.Unlock()
	switch {
	case conn == nil:
	case down:
		giveUp(conn)
	default:
		_ = conn.Close() // to the pool
	}
}

// giveUp takes a connection out of the pool.
func giveUp(conn *sql.Conn) {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
}

// Lose waits as Close does, but gives the connection up: for a transaction whose context
// has ended, after which lib/pq uses the connection for nothing. It can be closed
// meanwhile.
func (l *Line) Lose() {
	l.mu.Lock()
	conn := l.conn
	l.mu.Unlock()
	if conn != nil {
		giveUp(conn)
	}
}

// hangUp closes the connection.
func (l *Line) hangUp() {
	if l == nil { // SQLite's
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	if l.socket != nil {
		_ = l.socket.Close() // nobody waits for it
		l.socket = nil
	}
}

// DB is a pool. What a call (see [Do]) sends by it goes over the call's line, one
// statement after the other: rows are to be read before the next.
type DB struct{ *sql.DB }

// ExecContext is that of *sql.DB.
func (db DB) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return on(ctx, LineOf(ctx), db.DB, func(s statements) (sql.Result, error) { return s.ExecContext(ctx, query, args...) })
}

// QueryContext is that of *sql.DB.
func (db DB) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return on(ctx, LineOf(ctx), db.DB, func(s statements) (*sql.Rows, error) { return s.QueryContext(ctx, query, args...) })
}

// QueryRowContext is that of *sql.DB.
func (db DB) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	row, err := on(ctx, LineOf(ctx), db.DB, func(s statements) (*sql.Row, error) {
		row := s.QueryRowContext(ctx, query, args...)
		return row, row.Err()
	})
	if row == nil && err != nil { // there was no connection: nor is there one now
		return db.DB.QueryRowContext(ctx, query, args...)
	}
	return row
}

// PingContext is that of *sql.DB.
func (db DB) PingContext(ctx context.Context) error {
	_, err := on(ctx, LineOf(ctx), db.DB, func(s statements) (struct{}, error) { return struct{}{}, s.PingContext(ctx) })
	return err
}

type lineKey struct{}

// use is what a context says of the line of its call.
type use struct {
	line   *Line
	given  bool // for the next call
	commit bool
}

// On has the next call under ctx wait on l, over which it goes already.
func On(ctx context.Context, l *Line) context.Context {
	return context.WithValue(ctx, lineKey{}, use{line: l, given: true})
}

// Committing is On for a call that commits.
//
// One that waits for a synchronous standby has no answer either, and to close its
// connection has the pool open another one to the same server. So a few are closed at
// first, and the others when a later call has committed.
func Committing(ctx context.Context, l *Line) context.Context {
	return context.WithValue(ctx, lineKey{}, use{line: l, given: true, commit: true})
}

// LineOf returns the line of the call that ctx was given to; nil if there is none, or a
// transaction goes over it.
func LineOf(ctx context.Context) *Line {
	u, _ := ctx.Value(lineKey{}).(use)
	if u.given || u.line == nil {
		return nil
	}
	u.line.mu.Lock()
	defer u.line.mu.Unlock()
	if u.line.busy {
		return nil
	}
	return u.line
}
