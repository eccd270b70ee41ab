package bounded

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// Line is the connection of a transaction that a call waits on, with a driver that goes on
// waiting when the call has been given up. lib/pq reads until the server answers, and
// until then the connection has its place in the pool: a server that is silent would use
// the pool up. So the connection of an abandoned call is closed, which ends the read.
//
// That is safe beside the read: lib/pq's Close sends a message and closes the socket, and
// shares nothing else with it. And it meets no other call: while a connection can be
// closed it is not in the pool. But it waits for a write that the server does not take:
// the connection of a statement that fills the socket's buffers is the kernel's to give up.
//
// The zero value is a line without a connection.
type Line struct {
	mu     sync.Mutex // guards what follows
	conn   *sql.Conn
	socket io.Closer // of conn
	down   bool
	lost   bool // Lose was called before there was a connection

	limit time.Duration // of BEGIN; 0: none
	late  func()
}

// Limit has BeginTx call late, which ends its context, if it has had no answer for so long
// once it has a connection.
func (l *Line) Limit(limit time.Duration, late func()) { l.limit, l.late = limit, late }

// begin begins a transaction on a connection.
func (l *Line) begin(ctx context.Context, conn *sql.Conn, options *sql.TxOptions) (*sql.Tx, error) {
	if l.limit > 0 {
		defer time.AfterFunc(l.limit, l.late).Stop()
	}
	return conn.BeginTx(ctx, options)
}

// BeginTx begins a transaction of db on the line. As database/sql does, it tries other
// connections when the server had closed one before it was used. The line is to be closed when
// the transaction has ended, before anything else is asked of db: the pool may have one
// connection.
func (l *Line) BeginTx(ctx context.Context, db *sql.DB, options *sql.TxOptions) (*sql.Tx, error) {
	if l == nil {
		return db.BeginTx(ctx, options)
	}
	for bad := db.Stats().Idle; ; bad-- {
		conn, err := l.take(ctx, db)
		if err != nil {
			return nil, err
		}
		tx, err := l.begin(ctx, conn, options)
		if err == nil {
			return tx, nil
		}
		l.Close()
		if !errors.Is(err, driver.ErrBadConn) || bad <= 0 {
			return nil, err
		}
	}
}

// take takes a connection of the pool, and its socket where the driver goes on waiting, so
// that it can be closed beside a call that waits.
func (l *Line) take(ctx context.Context, db *sql.DB) (*sql.Conn, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	var socket io.Closer
	if _, waits := db.Driver().(*pq.Driver); waits {
		_ = conn.Raw(func(c any) error { socket, _ = c.(io.Closer); return nil }) // fails for a connection that is bad, which is found soon
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.down:
		_ = conn.Close() // to the pool
		return nil, ErrAbandoned
	case l.lost:
		_ = conn.Close()
		return nil, context.Canceled
	}
	l.conn, l.socket = conn, socket
	return conn, nil
}

// Raw calls f with the connection as the driver made it, which nothing else uses meanwhile.
// A panic of f is returned as an [*oncemill.PanicError].
func (l *Line) Raw(f func(driverConn any) error) error {
	l.mu.Lock()
	conn := l.conn
	l.mu.Unlock()
	if conn == nil {
		return sql.ErrConnDone
	}
	var failed error
	err := conn.Raw(func(c any) error {
		// After a panic, or driver.ErrBadConn, Raw would wait for the end of the transaction.
		failed = nopanic.Call(func() error { return f(c) })
		return nil
	})
	if err != nil {
		return err
	}
	return failed
}

// Close waits for the end of what goes over the line, and gives the connection back.
func (l *Line) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	conn, down := l.conn, l.down
	l.conn, l.socket = nil, nil
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
// meanwhile. A line that has no connection yet gets none: the driver may begin a
// transaction under a context that has ended, and nobody would give its connection back.
func (l *Line) Lose() {
	if l == nil {
		return
	}
	l.mu.Lock()
	conn := l.conn
	l.lost = conn == nil
	l.mu.Unlock()
	if conn != nil {
		defer time.AfterFunc(grace, l.hangUp).Stop() // the ROLLBACK of database/sql may have no answer
		giveUp(conn)
	}
}

// hangUp closes the connection.
func (l *Line) hangUp() {
	if l == nil { // SQLite's
		return
	}
	l.mu.Lock()
	socket := l.socket
	l.socket, l.down = nil, true
	l.mu.Unlock()
	if socket != nil {
		_ = socket.Close() // nobody waits for it
	}
}

// HungUp reports that the connection was closed because something that used it did not
// return in time: a statement without an answer, or rows that somebody keeps open.
func (l *Line) HungUp() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.down
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
	if u.line.conn != nil {
		return nil
	}
	return u.line
}
