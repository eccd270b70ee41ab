package bounded_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"runtime"
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
	failed         atomic.Int64
	frozen         atomic.Int64 // how many of the first connections have become silent
	silent         atomic.Int64 // how many of the first connections are never opened
	deaf           atomic.Int64 // each so manieth connection is never opened; 0: none
	refuses        atomic.Int64 // all but each so manieth connection are refused; 0: none
	refusesAtOnce  atomic.Int64 // each so manieth connection is refused before it takes any time; 0: none
	attempts       atomic.Int64
}

func (d *crowded) Open(string) (driver.Conn, error) { return d.Connect(context.Background()) }
func (d *crowded) Driver() driver.Driver            { return d }

func (d *crowded) Connect(ctx context.Context) (driver.Conn, error) {
	begun := time.Now()
	number := d.attempts.Add(1)
	if n := d.deaf.Load(); n > 0 && number%n == 0 {
		var cancel context.CancelFunc // database/sql also opens connections without any limit
		ctx, cancel = context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		<-ctx.Done()
	}
	if number <= d.silent.Load() {
		<-ctx.Done()
	}
	if n := d.refusesAtOnce.Load(); n > 0 && number%n == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	select {
	case <-time.After(time.Duration(d.takes.Load())):
	case <-ctx.Done():
		if d.fails != nil && time.Since(begun) > 10*time.Second {
			d.failed.Add(1)
			d.fails()
		}
		return nil, ctx.Err()
	}
	if n := d.refuses.Load(); d.down.Load() || n > 0 && number%n != 0 {
		return nil, io.ErrUnexpectedEOF
	}
	return &crowdedConn{brokenConn: brokenConn{int32(number)}, d: d}, nil //nolint:gosec // there are few
}

type crowdedConn struct {
	brokenConn

	d        *crowded
	canceled bool // during a statement
}

// ResetSession is called before an idle connection is used.
func (c *crowdedConn) ResetSession(ctx context.Context) error {
	if int64(c.number) <= c.d.frozen.Load() {
		<-ctx.Done()
		return driver.ErrBadConn
	}
	return nil
}

// IsValid is called before a connection returns to the pool.
func (c *crowdedConn) IsValid() bool { return !c.canceled }

// Ping is canceled with its context, like the statements of lib/pq and pgx, and the connection then closed.
func (c *crowdedConn) Ping(ctx context.Context) error {
	select {
	case <-time.After(time.Duration(c.d.answers.Load())):
	case <-ctx.Done():
		c.canceled = true
		return ctx.Err()
	}
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

// Calls that have no time for connections begin few, at last one each second.
func TestOver_ManyCallsOpenFewConnections(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, _ func() error) {
		calls := bounded.Over(db, 1000)
		d.takes.Store(int64(time.Hour))
		const callers, limit, long = 20, 300 * time.Millisecond, 30 * time.Second
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for begun := time.Now(); time.Since(begun) < long; {
					if err := ping(t.Context(), db, calls, limit); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
				}
			})
		}
		all.Wait()
		if n, most := d.attempts.Load(), int64(callers+15+long/time.Second); n < most/2 || n > most {
			t.Errorf("%d connections were begun, by the first calls and with pauses these are %d", n, most)
		}
	})
}

// If one fails, the next is begun at once, so that each of many calls learns why.
func TestOver_EachCallLearnsOfARefusal(t *testing.T) {
	t.Parallel()
	for _, most := range []int{0, 3, 20} {
		inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
			db.SetMaxOpenConns(most)
			d.takes.Store(int64(time.Hour))
			for range 2 { // pauses are longer then
				_ = ask()
			}
			time.Sleep(time.Minute)
			d.takes.Store(0)
			d.down.Store(true)
			var all sync.WaitGroup
			for range 18 {
				all.Go(func() {
					if err := ask(); !errors.Is(err, io.ErrUnexpectedEOF) {
						t.Errorf("a pool of %d: got %v", most, err)
					}
				})
			}
			all.Wait()
		})
	}
}

// A connection that is open later than its call ends does not mean that calls have time for one.
func TestOver_ALateConnectionDoesNotMakeAPoolWell(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		d.takes.Store(int64(7 * time.Second))
		for ask() != nil {
		}
		before := d.attempts.Load()
		db.SetMaxIdleConns(0) // closes the idle ones
		db.SetMaxIdleConns(20)
		var all sync.WaitGroup
		for range 18 {
			all.Go(func() { _ = ask() })
		}
		all.Wait()
		if n := d.attempts.Load() - before; n > 6 {
			t.Errorf("18 calls of 2 seconds began %d connections, which take 7", n)
		}
	})
}

// What was begun while a pool was slow ends when calls have time for connections again.
func TestOver_WhatWasBegunEndsWithTheSlowness(t *testing.T) {
	t.Parallel()
	inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
		const silent = 4
		d.silent.Store(silent)
		for ask() != nil {
		}
		synctest.Wait()
		if n, open := db.Stats().OpenConnections, int(d.attempts.Load()-silent); n != open {
			t.Errorf("%d connections have a place in the pool, %d are open", n, open)
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
	for name, fails := range map[string]func(){"panic": func() { panic("no token") }, "end of the goroutine": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inABubble(t, func(t *testing.T, d *crowded, db *sql.DB, ask func() error) {
				d.takes.Store(int64(time.Hour))
				d.fails = fails
				for range 4 { // the first one finds out that the database is slow
					if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
					time.Sleep(time.Minute)
				}
				if n := d.failed.Load(); n != 3 {
					t.Errorf("%d connections were opened apart from calls", n)
				}
				d.takes.Store(0)
				if err := ask(); err != nil {
					t.Error(err)
				}
			})
		})
	}
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
		for range 2 {
			if err := ask(); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		}
		for range 20 {
			if err := ask(); err != nil {
				t.Error(err)
			}
		}
	})
}
