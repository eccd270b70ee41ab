package bounded

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"reflect"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// Line is the connection of a transaction whose calls may be abandoned. lib/pq reads
// until the server answers, and so does pgx if the context of a statement does not end.
// Until then the connection keeps its place in the pool, so a silent server would exhaust
// the pool. Closing the connection ends the read.
//
// It affects no other call, since the connection is not in the pool meanwhile.
//
// The zero value is a line without a connection.
type Line struct {
	mu     sync.Mutex // guards the fields up to lost
	conn   *sql.Conn
	driver any // the driver's connection of conn
	down   bool
	lost   bool // Lose was called before there was a connection

	limit time.Duration // of BEGIN; 0: none
	late  func()
}

// Limit makes BeginTx call late if BEGIN has no answer within limit, counted from the
// moment it has a connection. late must end BeginTx's context.
func (l *Line) Limit(limit time.Duration, late func()) { l.limit, l.late = limit, late }

// patience is how long BEGIN may have no answer before another connection is tried. A pool's idle
// connections may lead to a server that is frozen, while new ones reach the one that has replaced
// it. The second connection has all the time that is left: a server may be slow.
const patience = time.Second

// begin begins a transaction on a connection, which is closed if BEGIN has no answer within
// wait, unless that is 0. Then silent is true.
func (l *Line) begin(ctx context.Context, conn *sql.Conn, options *sql.TxOptions, wait time.Duration) (tx *sql.Tx, silent bool, err error) {
	if l.limit > 0 {
		defer time.AfterFunc(l.limit, l.late).Stop()
	}
	l.mu.Lock()
	driverConn := l.driver
	l.mu.Unlock()
	if wait == 0 || socketOf(driverConn) == nil {
		tx, err = conn.BeginTx(ctx, options)
		return tx, false, err
	}
	// The end of a context would not do: lib/pq then asks the server to cancel, and waits.
	hangUp := time.AfterFunc(wait, func() { l.closeSocket(conn) })
	tx, err = conn.BeginTx(ctx, options)
	if hangUp.Stop() {
		return tx, false, err
	}
	if err == nil { // the answer came in this moment
		_ = tx.Rollback()
	}
	return nil, true, err
}

// BeginTx begins a transaction of db on the line. Like database/sql, it tries other
// connections if the server had closed the first, and also another one if the first is silent.
// Close the line when the transaction has ended, before any other use of db: the pool may have
// only one connection.
func (l *Line) BeginTx(ctx context.Context, db *sql.DB, options *sql.TxOptions) (*sql.Tx, error) {
	if l == nil {
		return db.BeginTx(ctx, options)
	}
	wait := patience
	for bad := db.Stats().Idle; ; bad-- {
		var tx *sql.Tx
		conn, silent, err := l.take(ctx, db, wait)
		if err == nil {
			tx, silent, err = l.begin(ctx, conn, options, wait)
		}
		switch {
		case silent:
			l.discard()
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			dropIdle(ctx, db)
			wait = 0
			continue
		case conn == nil:
			return nil, err
		case err == nil:
			return tx, nil
		}
		l.Close()
		if !errors.Is(err, driver.ErrBadConn) || bad <= 0 {
			return nil, err
		}
	}
}

// dropIdle closes the idle connections of a pool, one of which was silent: the others lead to the
// same server, and each would cost its time.
func dropIdle(ctx context.Context, db *sql.DB) {
	most := db.Stats().Idle
	each := patience / time.Duration(most+1)
	for ; most > 0 && db.Stats().Idle > 0 && ctx.Err() == nil; most-- {
		dropOne(ctx, db, each)
	}
}

// dropOne closes an idle connection. pgx closes it itself: it pings one before it is used, and has
// no answer within the limit.
func dropOne(ctx context.Context, db *sql.DB, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if conn, err := db.Conn(ctx); err == nil { // an idle one, unless somebody has just taken the last
		giveUp(conn)
	}
}

// take takes a connection from the pool, with that of the driver, which can be closed during
// a call. If an idle one has no answer within wait, unless that is 0, silent is true: pgx pings
// one before it is used.
func (l *Line) take(ctx context.Context, db *sql.DB, wait time.Duration) (conn *sql.Conn, silent bool, err error) {
	limited := ctx
	if wait > 0 && db.Stats().Idle > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(ctx, wait)
		defer cancel()
	}
	conn, err = db.Conn(limited)
	if err != nil {
		return nil, ctx.Err() == nil && limited.Err() != nil, err
	}
	var driverConn any
	_ = Raw(conn, func(c any) error { driverConn = c; return nil }) // fails for a bad connection, which BEGIN finds too
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.down:
		_ = conn.Close() // to the pool
		return nil, false, ErrAbandoned
	case l.lost:
		_ = conn.Close()
		return nil, false, context.Canceled
	}
	l.conn, l.driver = conn, driverConn
	return conn, false, nil
}

// socketOf returns what to close to end a read or write of a driver's connection; nil for
// an unknown driver.
func socketOf(driverConn any) io.Closer {
	v := reflect.ValueOf(driverConn)
	if v.Kind() != reflect.Pointer {
		return nil
	}
	switch v.Type().Elem().PkgPath() {
	case "github.com/lib/pq":
		// Its Close sends a message and closes the socket, and shares nothing else with a
		// read. It blocks behind a write that the server does not accept: then the
		// connection lasts until the kernel gives it up.
		socket, _ := driverConn.(io.Closer)
		return socket
	case "github.com/jackc/pgx/v5/stdlib":
		// Its Close shares more with a read, so this is the socket itself:
		// driverConn.Conn().PgConn().Conn(). Nobody who uses lib/pq should link pgx.
		socket, _ := v.MethodByName("Conn").Call(nil)[0].
			MethodByName("PgConn").Call(nil)[0].
			MethodByName("Conn").Call(nil)[0].Interface().(io.Closer)
		return socket
	}
	return nil
}

// Raw calls f with the driver's connection, which nothing else uses meanwhile. It returns
// a panic of f as an [*oncemill.PanicError].
func (l *Line) Raw(f func(driverConn any) error) error {
	l.mu.Lock()
	conn := l.conn
	l.mu.Unlock()
	if conn == nil {
		return sql.ErrConnDone
	}
	var failed error
	err := Raw(conn, func(c any) error {
		// sql.Conn.Raw waits for the end of the transaction after a panic or driver.ErrBadConn.
		failed = nopanic.Call(func() error { return f(c) })
		return nil
	})
	if err != nil {
		return err
	}
	return failed
}

// Close waits for a call in progress on the line, and returns the connection to the pool.
func (l *Line) Close() {
	if l == nil {
		return
	}
	l.mu.Lock()
	conn, down := l.conn, l.down
	l.conn, l.driver = nil, nil
	l.mu.Unlock()
	switch {
	case conn == nil:
	case down:
		giveUp(conn)
	default:
		_ = conn.Close() // to the pool
	}
}

// giveUp removes a connection from the pool.
func giveUp(conn *sql.Conn) {
	_ = Raw(conn, func(any) error { return driver.ErrBadConn })
}

// Raw is conn.Raw. Where conn is closed in the same moment, as when the context of its transaction
// ends, sql.Conn.Raw (Go 1.26) may find it open, and then panics before it calls f: it is closed.
func Raw(conn *sql.Conn, f func(driverConn any) error) (err error) {
	begun := false
	defer func() {
		if !begun && recover() != nil { // a panic of f is the caller's
			err = sql.ErrConnDone
		}
	}()
	return conn.Raw(func(driverConn any) error {
		begun = true
		return f(driverConn)
	})
}

// discard removes the line's connection from the pool. The line may get another.
func (l *Line) discard() {
	l.mu.Lock()
	conn := l.conn
	l.conn, l.driver = nil, nil
	l.mu.Unlock()
	if conn != nil {
		giveUp(conn)
	}
}

// closeSocket closes the driver's connection of conn, if that is still the line's and not closed
// yet. This ends a call in progress on it. (Two connections of a driver cannot be compared: a wrapper
// may be a struct with functions.)
func (l *Line) closeSocket(conn *sql.Conn) {
	l.mu.Lock()
	var driverConn any
	if conn == l.conn {
		driverConn, l.driver = l.driver, nil
	}
	l.mu.Unlock()
	if socket := socketOf(driverConn); socket != nil {
		_ = socket.Close() // nobody waits for it
	}
}

// Lose waits like Close, but removes the connection from the pool. It is for a
// transaction whose context has ended, after which lib/pq does not use the connection
// again. A line that has no connection yet gets none: the driver may begin a transaction
// under an ended context, and nobody would return its connection.
func (l *Line) Lose() {
	if l == nil {
		return
	}
	l.mu.Lock()
	conn := l.conn
	l.lost = conn == nil
	l.mu.Unlock()
	if conn != nil {
		defer time.AfterFunc(grace, l.hangUp).Stop() // database/sql's ROLLBACK may get no answer
		giveUp(conn)
	}
}

// hangUp closes the connection.
func (l *Line) hangUp() {
	if l == nil { // SQLite's
		return
	}
	l.mu.Lock()
	conn := l.conn
	l.down = true
	l.mu.Unlock()
	l.closeSocket(conn)
}

// HungUp reports whether the connection was closed because a use of it did not return in
// time: a statement without an answer, or rows that were not closed.
func (l *Line) HungUp() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.down
}

type lineKey struct{}

// use is the line of a call, carried by the call's context.
type use struct {
	line   *Line
	given  bool // set by Beginning, On or Committing for the next call
	begin  bool
	commit bool
}

// Beginning returns a context whose next call is [Line.BeginTx] of l.
func Beginning(ctx context.Context, l *Line) context.Context {
	return context.WithValue(ctx, lineKey{}, use{line: l, given: true, begin: true})
}

// On returns a context whose next call is one on l, which has its connection already.
func On(ctx context.Context, l *Line) context.Context {
	return context.WithValue(ctx, lineKey{}, use{line: l, given: true})
}

// Committing is On for a call that commits.
//
// A COMMIT that waits for a synchronous standby has no answer either. Closing its
// connection makes the pool open another one to the same server. So only a few are
// closed at first, and the others when a later call has committed.
func Committing(ctx context.Context, l *Line) context.Context {
	return context.WithValue(ctx, lineKey{}, use{line: l, given: true, commit: true})
}

// LineOf returns the line of the call that received ctx. It returns nil if there is none,
// or if the line has a transaction.
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
