package bounded_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
)

// crowded is a server that takes its time to accept a connection, or accepts none. Its
// connections break at once if it is down.
type crowded struct {
	takes, answers  atomic.Int64 // time.Duration: to accept a connection, to answer a ping
	down            atomic.Bool
	attempts        atomic.Int64
	opening, atOnce atomic.Int64
}

func (d *crowded) Open(string) (driver.Conn, error) { return d.Connect(context.Background()) }
func (d *crowded) Driver() driver.Driver            { return d }

func (d *crowded) Connect(ctx context.Context) (driver.Conn, error) {
	d.attempts.Add(1)
	d.atOnce.Store(max(d.atOnce.Load(), d.opening.Add(1)))
	defer d.opening.Add(-1)
	select {
	case <-time.After(time.Duration(d.takes.Load())):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if d.down.Load() {
		return nil, io.ErrUnexpectedEOF
	}
	return &crowdedConn{d: d}, nil
}

type crowdedConn struct {
	brokenConn

	d *crowded
}

func (c *crowdedConn) Ping(context.Context) error {
	time.Sleep(time.Duration(c.d.answers.Load()))
	if c.d.down.Load() {
		return driver.ErrBadConn
	}
	return nil
}

// inABubble runs a test with calls on a pool of a crowded server.
func inABubble(t *testing.T, test func(t *testing.T, d *crowded, db *sql.DB, ask func() error)) {
	synctest.Test(t, func(t *testing.T) {
		d := &crowded{}
		db := sql.OpenDB(d)
		defer db.Close()
		const most, limit = 10, 2 * time.Second
		calls := bounded.Over(db, most)
		ask := func() error {
			_, err := bounded.Do(t.Context(), calls, limit, func(ctx context.Context) (struct{}, error) {
				return struct{}{}, db.PingContext(ctx)
			})
			return err
		}
		test(t, d, db, ask)
		time.Sleep(time.Hour) // what was begun ends
	})
}

// The first of several addresses may be silent, or the server has many clients to accept: then a
// connection takes longer than a call may take.
func TestOver_ConnectionsMayTakeLongerThanCalls(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.takes.Store(int64(7 * time.Second))
		calls := 1
		for ; ask() != nil; calls++ {
			if calls == 100 {
				t.Fatal("never connected")
			}
		}
		if n := d.attempts.Load(); n > 2 {
			t.Errorf("%d connections were begun for %d calls", n, calls)
		}
	})
}

func TestOver_OpensOneConnectionAtATimeAfterAnOutage(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		db.SetMaxIdleConns(50)
		d.down.Store(true)
		if err := ask(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("not down: %v", err)
		}
		d.down.Store(false)
		d.takes.Store(int64(20 * time.Millisecond))
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if err := ask(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := d.atOnce.Load(); n > 3 {
			t.Errorf("%d connections were opened at once", n)
		}
		d.atOnce.Store(0)
		conns := make(chan *sql.Conn, 50)
		for range cap(conns) { // the outage is over
			all.Go(func() {
				conn, err := db.Conn(t.Context())
				if err != nil {
					t.Error(err)
				}
				conns <- conn
			})
		}
		all.Wait()
		for range 3 {
			all.Go(func() {
				if err := ask(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := d.atOnce.Load(); n < 3 {
			t.Errorf("%d connections were opened at once after the outage: calls still wait for each other", n)
		}
		for range cap(conns) {
			_ = (<-conns).Close()
		}
	})
}

// Calls are short: one connection is enough for those that wait. It may be gone in the moment in
// which a call is told of it, and then that call opens one itself.
func TestOver_CallsThatWaitShareAConnection(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.down.Store(true)
		if err := ask(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("not down: %v", err)
		}
		d.down.Store(false)
		d.takes.Store(int64(1500 * time.Millisecond)) // two in a row take longer than a call may
		d.answers.Store(int64(17 * time.Millisecond))
		const calls = 10
		var answered atomic.Int64
		var all sync.WaitGroup
		for range calls {
			all.Go(func() {
				if ask() == nil {
					answered.Add(1)
				}
			})
		}
		all.Wait()
		if n := answered.Load(); n < calls/2 {
			t.Errorf("%d of %d calls were answered", n, calls)
		}
	})
}

func TestOver_FailsAtOnceForAMomentAfterAFailure(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.down.Store(true)
		const calls = 1000
		for range calls {
			if err := ask(); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("not down: %v", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n := d.attempts.Load(); n < 5 || n > 40 {
			t.Errorf("%d connections were begun in 10 seconds", n)
		}
		d.down.Store(false)
		begun := time.Now()
		for ask() != nil {
			time.Sleep(10 * time.Millisecond)
		}
		if after := time.Since(begun); after > 2*time.Second {
			t.Errorf("connected %v after the outage", after)
		}
	})
}

// A connection that is idle, or that the pool makes a call wait for, needs no other.
func TestOver_WaitsForNoConnectionThatIsNotNeeded(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		db.SetMaxOpenConns(2)
		first, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		d.takes.Store(int64(time.Minute))
		if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a connection was opened: %v", err)
		}
		_ = first.Close()
		if err := ask(); err != nil {
			t.Errorf("with an idle connection: %v", err)
		}
		d.takes.Store(0)
		first, err = db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		second, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Second, func() { _ = second.Close() })
		if err := ask(); err != nil {
			t.Errorf("with a full pool: %v", err)
		}
		_ = first.Close()
		if n := d.attempts.Load(); n != 3 {
			t.Errorf("%d connections were begun", n)
		}
	})
}

// A transaction takes its connection itself, and waits as other calls do.
func TestOver_TransactionsWaitForConnectionsToo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &crowded{}
		db := sql.OpenDB(d)
		defer db.Close()
		const most, transactions = 10, 20
		calls := bounded.Over(db, most)
		d.down.Store(true)
		if _, err := boundtx.Begin(t.Context(), db, oncemill.PostgreSQL, calls, nil); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("not down: %v", err)
		}
		d.down.Store(false)
		d.takes.Store(int64(20 * time.Millisecond))
		var all sync.WaitGroup
		for range transactions {
			all.Go(func() {
				tx, err := boundtx.Begin(t.Context(), db, oncemill.PostgreSQL, calls, nil)
				if err != nil {
					t.Error(err)
					return
				}
				tx.Rollback()
			})
		}
		all.Wait()
		if n := d.atOnce.Load(); n > 3 { // one that was idle may be taken in the moment in which it is handed out
			t.Errorf("%d connections were opened at once", n)
		}
		time.Sleep(time.Hour) // what was begun ends
	})
}
