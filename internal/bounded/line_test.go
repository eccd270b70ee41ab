package bounded_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
)

// broken is a driver whose connections break when they commit.
type broken struct{ opened atomic.Int32 }

type brokenConn struct{ number int32 }

func (d *broken) Connect(context.Context) (driver.Conn, error) {
	return &brokenConn{d.opened.Add(1)}, nil
}
func (d *broken) Open(string) (driver.Conn, error)      { return d.Connect(context.Background()) }
func (d *broken) Driver() driver.Driver                 { return d }
func (*brokenConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not here") }
func (*brokenConn) Close() error                        { return nil }
func (c *brokenConn) Begin() (driver.Tx, error)         { return c, nil }
func (*brokenConn) Commit() error                       { return driver.ErrBadConn }
func (*brokenConn) Rollback() error                     { return nil }

// A broken connection does not return to the pool, even from a line.
func TestLine_DropsABrokenConnection(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(&broken{})
	defer db.Close()
	db.SetMaxOpenConns(1)
	line := new(bounded.Line)
	line.Limit(time.Minute, func() {})
	tx, err := line.BeginTx(t.Context(), db, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); !errors.Is(err, driver.ErrBadConn) {
		t.Errorf("committed with %v", err)
	}
	line.Close()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.Raw(func(c any) error {
		if n := c.(*brokenConn).number; n != 2 {
			t.Errorf("the next connection is number %d", n)
		}
		return nil
	})
}

// traced is a driver whose connections are those of a wrapper that cannot be compared: structs with functions. They
// answer no COMMIT.
type traced struct{ broken }

type tracedConn struct {
	*brokenConn
	trace func()
}

func (d *traced) Connect(context.Context) (driver.Conn, error) {
	return tracedConn{&brokenConn{d.opened.Add(1)}, func() {}}, nil
}

func (c tracedConn) Begin() (driver.Tx, error) { return c, nil }
func (c tracedConn) Commit() error {
	time.Sleep(1500 * time.Millisecond) // longer than a call is waited for
	return driver.ErrBadConn
}

// A connection may be given up whatever its driver's looks like.
func TestLine_HangsUpAConnectionThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(&traced{})
	defer db.Close()
	calls := bounded.New(1)
	_, err := bounded.Do(t.Context(), calls, time.Millisecond, func(ctx context.Context) (bool, error) {
		tx, err := bounded.LineOf(ctx).BeginTx(context.WithoutCancel(ctx), db, nil)
		if err != nil {
			return false, err
		}
		return true, tx.Commit()
	})
	if !errors.Is(err, bounded.ErrAbandoned) {
		t.Errorf("got %v", err)
	}
	<-calls.Idle()
}

// pinged is a driver that pings a connection before it is used again, as pgx does. The server of
// the first connections, up to frozen, gives no answer.
type pinged struct {
	broken
	frozen atomic.Int32
}

type pingedConn struct {
	brokenConn
	server *pinged
}

func (d *pinged) Connect(context.Context) (driver.Conn, error) {
	return &pingedConn{brokenConn{d.opened.Add(1)}, d}, nil
}

func (c *pingedConn) ResetSession(ctx context.Context) error {
	if c.number > c.server.frozen.Load() {
		return nil
	}
	<-ctx.Done()
	return driver.ErrBadConn
}

// Idle connections that do not answer a ping are replaced, all at once.
func TestLine_ReplacesIdleConnectionsThatAnswerNoPing(t *testing.T) {
	t.Parallel()
	const idle = 4
	server := new(pinged)
	db := sql.OpenDB(server)
	defer db.Close()
	db.SetMaxIdleConns(idle)
	var conns []*sql.Conn
	for range idle {
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		_ = conn.Close() // to the pool
	}
	server.frozen.Store(idle)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	line := new(bounded.Line)
	tx, err := line.BeginTx(ctx, db, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := db.Stats().OpenConnections; n != 1 {
		t.Errorf("%d connections are open", n)
	}
	_ = tx.Rollback()
	line.Close()
}

// A connection may be closed in the moment in which it is used: by database/sql, for example, when the
// context of its transaction ends.
func TestRaw_OfAConnectionThatIsBeingClosed(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(&broken{})
	defer db.Close()
	db.SetMaxOpenConns(1)
	closed := 0
	use := func(conn *sql.Conn) (err error) {
		defer func() {
			if v := recover(); v != nil {
				t.Fatalf("panicked: %v", v)
			}
		}()
		return bounded.Raw(conn, func(any) error { return nil })
	}
	for range 200_000 {
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var closing sync.WaitGroup
		closing.Go(func() { _ = conn.Close() })
		if err := use(conn); errors.Is(err, sql.ErrConnDone) {
			closed++
		} else if err != nil {
			t.Fatal(err)
		}
		closing.Wait()
	}
	t.Logf("%d times it was closed before", closed)
}

func TestRaw_PassesAPanicOn(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(&broken{})
	defer db.Close()
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer func() {
		if v := recover(); v != "torn" {
			t.Errorf("panicked with %v", v)
		}
	}()
	_ = bounded.Raw(conn, func(any) error { panic("torn") })
	t.Error("it returned")
}
