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

	"github.com/oncemill/oncemill/internal/bounded"
)

// crowded is a server that takes its time to accept a connection, or accepts none. Its
// connections break at once if it is down.
type crowded struct {
	takes, answers atomic.Int64 // time.Duration: to accept a connection, to answer a ping
	down           atomic.Bool
	fails          func() // at the end of a connection that was opened apart from calls
	panicked       atomic.Int64
	frozen         atomic.Int64 // how many of the first connections have become silent
	silent         atomic.Int64 // how many of the first connections are never opened
	attempts       atomic.Int64
}

func (d *crowded) Open(string) (driver.Conn, error) { return d.Connect(context.Background()) }
func (d *crowded) Driver() driver.Driver            { return d }

func (d *crowded) Connect(ctx context.Context) (driver.Conn, error) {
	begun := time.Now()
	number := d.attempts.Add(1)
	if number <= d.silent.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	select {
	case <-time.After(time.Duration(d.takes.Load())):
	case <-ctx.Done():
		if d.fails != nil && time.Since(begun) > 10*time.Second {
			d.panicked.Add(1)
			d.fails()
		}
		return nil, ctx.Err()
	}
	if d.down.Load() {
		return nil, io.ErrUnexpectedEOF
	}
	return &crowdedConn{brokenConn{int32(number)}, d}, nil //nolint:gosec // there are few
}

type crowdedConn struct {
	brokenConn

	d *crowded
}

// ResetSession is called before an idle connection is used.
func (c *crowdedConn) ResetSession(ctx context.Context) error {
	if int64(c.number) <= c.d.frozen.Load() {
		<-ctx.Done()
		return driver.ErrBadConn
	}
	return nil
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
		if calls > 10 {
			t.Errorf("connected after %d calls", calls)
		}
	})
}

// One connection is opened at a time, for all calls, and rarely if that fails.
func TestOver_OpensOneConnectionAtATime(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.takes.Store(int64(time.Hour))
		const calls, times = 20, 5
		for range times {
			var all sync.WaitGroup
			for range calls {
				all.Go(func() {
					if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
				})
			}
			all.Wait()
		}
		if own := d.attempts.Load() - calls*times; own != 1 {
			t.Errorf("%d connections were begun apart from calls, which took 10 seconds", own)
		}
		d.takes.Store(0)
		d.down.Store(true)
		time.Sleep(15 * time.Second)
		d.attempts.Store(0)
		d.takes.Store(int64(3 * time.Second))
		for range times {
			_ = ask()
		}
		if own := d.attempts.Load() - times; own < 1 || own >= times {
			t.Errorf("%d connections were begun apart from %d calls, of 2 seconds each", own, times)
		}
	})
}

// After a failover, idle connections may lead to a server that is frozen. Calls find out.
func TestOver_ASilentIdleConnectionKeepsNoOtherFromBeingOpened(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		var idle []*sql.Conn
		for range 2 {
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			idle = append(idle, conn)
		}
		for _, conn := range idle {
			_ = conn.Close()
		}
		d.frozen.Store(int64(len(idle)))
		d.takes.Store(int64(7 * time.Second))
		for begun := time.Now(); ask() != nil; {
			if since := time.Since(begun); since > 15*time.Second {
				t.Fatalf("not connected after %v", since)
			}
		}
	})
}

// A driver may panic, or end its goroutine. That must not end the process, nor keep others from trying.
func TestOver_SurvivesAConnectionThatPanics(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.takes.Store(int64(time.Hour))
		d.fails = func() { panic("no token") }
		for range 3 {
			if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			time.Sleep(time.Minute)
		}
		if n := d.panicked.Load(); n != 3 {
			t.Errorf("%d connections were opened apart from calls", n)
		}
	})
}

// A pool that keeps few idle connections has to open many. Nobody waits for them longer than before.
func TestOver_ABusyPoolIsAskedByAllSoonAfterAnOutage(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		db.SetMaxIdleConns(2)
		d.takes.Store(int64(20 * time.Millisecond))
		d.answers.Store(int64(20 * time.Millisecond))
		d.down.Store(true)
		time.AfterFunc(time.Second, func() { d.down.Store(false) })
		const each = 3 * time.Millisecond
		var failed atomic.Int64
		var all sync.WaitGroup
		for begun := time.Now(); time.Since(begun) < 10*time.Second; time.Sleep(each) {
			late := time.Since(begun) > 4*time.Second
			all.Go(func() {
				if ask() != nil && late {
					failed.Add(1)
				}
			})
		}
		all.Wait()
		if n := failed.Load(); n > 0 {
			t.Errorf("%d calls failed long after the outage", n)
		}
	})
}

// One silent server behind an address with several keeps no call but its own.
func TestOver_ASilentServerStopsNobodyElse(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, _ *sql.DB, ask func() error) {
		d.silent.Store(2)
		if err := ask(); !errors.Is(err, context.DeadlineExceeded) { // and the connection after it, opened apart
			t.Fatalf("got %v", err)
		}
		synctest.Wait()
		for range 20 {
			if err := ask(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
