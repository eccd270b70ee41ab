package bounded_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
)

// answered returns how many of the calls of some goroutines had an answer, within a time.
func answered(goroutines int, within time.Duration, call func() error) int64 {
	var well atomic.Int64
	var all sync.WaitGroup
	begun := time.Now()
	for range goroutines {
		all.Go(func() {
			for time.Since(begun) < within {
				if call() == nil {
					well.Add(1)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	all.Wait()
	return well.Load()
}

// As long as a connection takes less than a call may, calls have their answers, also if the pool keeps no
// connection and each call opens one. The trouble that made the pool slow is over. (A pool that keeps a
// few has 0.8 to 1.3 times the answers, since it depends on how they pass from hand to hand.)
func TestOver_ASlowServerIsUsedAsBefore(t *testing.T) {
	t.Parallel()
	const limit = 2 * time.Second
	for _, goroutines := range []int{1, 10} {
		for _, takes := range []time.Duration{500, 1100, 1800} {
			apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
				db.SetMaxIdleConns(-1)
				d.takes.Store(int64(time.Hour))
				_ = ping(t.Context(), db, calls, limit)
				time.Sleep(time.Minute)
				d.takes.Store(int64(takes * time.Millisecond))
				return answered(goroutines, 2*time.Minute, func() error { return ping(t.Context(), db, calls, limit) })
			})
			if apart < own*9/10 {
				t.Errorf("%d goroutines, a connection takes %v: %d answers, by themselves %d", goroutines, takes*time.Millisecond, apart, own)
			}
		}
	}
}

// Calls begin at the same time, when the pool has no connection, and each fails that has waited. That
// does not make the pool slow for the next ones.
func TestOver_CallsThatWaitedDoNotMakeAPoolSlow(t *testing.T) {
	t.Parallel()
	const bursts, each = 30, 20
	apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		db.SetConnMaxLifetime(500 * time.Millisecond)
		d.takes.Store(int64(time.Hour))
		_ = ping(t.Context(), db, calls, 2*time.Second)
		time.Sleep(time.Minute)
		d.takes.Store(int64(1500 * time.Millisecond))
		d.answers.Store(int64(100 * time.Millisecond))
		var well atomic.Int64
		for range bursts {
			for range each {
				go func() {
					if ping(t.Context(), db, calls, 2*time.Second) == nil {
						well.Add(1)
					}
				}()
			}
			time.Sleep(5 * time.Second)
		}
		return well.Load()
	})
	if apart < own-each {
		t.Errorf("%d answers, by themselves %d", apart, own)
	}
}

// besideShortCalls returns how many answers calls of 5 seconds have in 5 minutes, beside others that have
// no time for a connection, which takes a second, in a pool that keeps none.
func besideShortCalls(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
	db.SetMaxIdleConns(-1)
	d.takes.Store(int64(time.Second))
	const long = 5 * time.Minute
	go answered(20, long, func() error { return ping(t.Context(), db, calls, 200*time.Millisecond) })
	return answered(2, long, func() error { return ping(t.Context(), db, calls, 5*time.Second) })
}

// Those with a short limit may never have time for a connection, and the others always. (If the pool
// keeps connections, they share those.)
func TestOver_CallsWithTimeDoNotWaitForThoseWithout(t *testing.T) {
	t.Parallel()
	if apart, own := compare(t, besideShortCalls); apart < own*9/10 {
		t.Errorf("those with time had %d answers, by themselves %d", apart, own)
	}
}

// A call that has waited may find an idle connection when it has too little time left for a statement, which would
// be canceled, and the connection be closed.
func TestOver_CallsThatWaitedLeaveConnectionsToOthers(t *testing.T) {
	t.Parallel()
	for of, short := range map[string]func(*testing.T, *sql.DB, *bounded.Calls) error{
		"the calls": func(t *testing.T, db *sql.DB, calls *bounded.Calls) error {
			return ping(t.Context(), db, calls, 100*time.Millisecond)
		},
		"their callers": func(t *testing.T, db *sql.DB, calls *bounded.Calls) error {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			return ping(ctx, db, calls, 10*time.Second)
		},
	} {
		apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
			db.SetMaxIdleConns(20)
			d.takes.Store(int64(time.Second))
			d.answers.Store(int64(20 * time.Millisecond))
			const long = 30 * time.Second
			go answered(2, long, func() error { return ping(t.Context(), db, calls, 5*time.Second) })
			return answered(20, long, func() error { return short(t, db, calls) })
		})
		if apart < own*3/4 {
			t.Errorf("with limits of %s: %d answers, by themselves %d", of, apart, own)
		}
	}
}

// A server refuses each third connection at once. That shows nothing about the others.
func TestOver_CallsThatWereRefusedKeepTheirTime(t *testing.T) {
	t.Parallel()
	apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		db.SetMaxIdleConns(-1)
		d.refusesAtOnce.Store(3)
		d.takes.Store(int64(3 * time.Second))
		const long = 2 * time.Minute
		go answered(20, long, func() error { return ping(t.Context(), db, calls, time.Millisecond) })
		return answered(1, long, func() error { return ping(t.Context(), db, calls, 5*time.Second) })
	})
	if apart < own*3/4 {
		t.Errorf("%d answers, by themselves %d", apart, own)
	}
}

// That a statement of an open transaction fails says nothing about opening connections.
func TestOver_StatementsDoNotMakeAPoolSlow(t *testing.T) {
	t.Parallel()
	apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		go answered(1, 5*time.Minute, func() error {
			_, err := bounded.Do(bounded.On(t.Context(), new(bounded.Line)), calls, math.MaxInt64, func(context.Context) (struct{}, error) {
				time.Sleep(5 * time.Second)
				return struct{}{}, io.ErrUnexpectedEOF
			})
			return err
		})
		return besideShortCalls(t, d, db, calls)
	})
	if apart < own*9/10 {
		t.Errorf("beside failing statements calls had %d answers, by themselves %d", apart, own)
	}
}

// database/sql opens connections for those that queue up for places, so a pool whose calls never have
// time for one becomes full. Here few calls queue up.
func TestOver_APoolWithALimitBecomesFull(t *testing.T) {
	t.Parallel()
	const limit, long = 2 * time.Second, 2 * time.Minute
	begins := map[string]func(ask func() error){
		"beside one": func(ask func() error) {
			go answered(1, long, ask)
			time.Sleep(8 * time.Second)
		},
		"after many in vain": func(ask func() error) {
			for range 12 {
				_ = ask()
			}
		},
	}
	for _, most := range []int{2, 3, 4, 20} {
		for when, begin := range begins {
			for _, refuses := range []int64{0, 2} {
				apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
					db.SetMaxOpenConns(most)
					db.SetMaxIdleConns(most)
					d.refusesAtOnce.Store(refuses)
					d.takes.Store(int64(3 * time.Second))
					d.answers.Store(int64(20 * time.Millisecond))
					ask := func() error { return ping(t.Context(), db, calls, limit) }
					begin(ask)
					return answered(3*most, long, ask)
				})
				if apart < own/2 {
					t.Errorf("a pool of %d, %s, refusing 1 of %d: %d answers, by itself %d", most, when, refuses, apart, own)
				}
			}
		}
	}
}

// A call may also be limited by the context of its caller.
func TestOver_DeadlinesOfCallersCount(t *testing.T) {
	t.Parallel()
	apart, _ := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		d.takes.Store(int64(3 * time.Second))
		return answered(5, time.Minute, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			return ping(ctx, db, calls, 10*time.Second)
		})
	})
	if apart == 0 {
		t.Error("never connected")
	}
}

// The time that a transaction waits for a place in a full pool does not count, also if the pool has become
// full while the transaction waited for a connection.
func TestOver_ATransactionWaitsForAPoolThatHasBecomeFull(t *testing.T) {
	t.Parallel()
	for _, most := range []int{2, 10} {
		compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
			db.SetMaxOpenConns(most)
			d.takes.Store(int64(time.Hour))
			_ = ping(t.Context(), db, calls, 10*time.Second)
			time.Sleep(time.Minute)
			d.takes.Store(int64(20 * time.Millisecond))
			var all sync.WaitGroup
			for range 2 * most {
				all.Go(func() {
					tx, err := boundtx.Begin(t.Context(), db, oncemill.PostgreSQL, calls, nil)
					if err != nil {
						t.Errorf("in a pool of %d: %v", most, err)
						return
					}
					time.Sleep(15 * time.Second)
					tx.Rollback()
				})
				time.Sleep(time.Millisecond)
			}
			all.Wait()
			return 0
		})
	}
}

// A server refuses most connections at once, as when it has too many clients.
func TestOver_RefusalsDoNotStopASmallPool(t *testing.T) {
	t.Parallel()
	for _, most := range []int{0, 1, 3, 8} {
		for _, part := range []int64{2, 8} {
			apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
				db.SetMaxOpenConns(most)
				db.SetMaxIdleConns(-1)
				d.takes.Store(int64(time.Hour))
				_ = ping(t.Context(), db, calls, 2*time.Second)
				time.Sleep(time.Minute)
				d.takes.Store(int64(2 * time.Millisecond))
				d.refuses.Store(part)
				return answered(10, 20*time.Second, func() error { return ping(t.Context(), db, calls, 2*time.Second) })
			})
			if apart < own*4/10 { // one at a time tries
				t.Errorf("a pool of %d, of %d connections 1 is accepted: %d answers, by itself %d", most, part, apart, own)
			}
		}
	}
}

// After an outage a busy server serves more than it would if each call opened its own connection.
func TestOver_ABusyServerAnswersMoreCalls(t *testing.T) {
	t.Parallel()
	const processes, goroutines = 10, 18
	for _, most := range []int{0, goroutines} {
		answers := map[string]int64{}
		for way, calls := range ways {
			synctest.Test(t, func(t *testing.T) {
				s := newBusyServer(time.Minute)
				s.d.answers.Store(int64(200 * time.Millisecond))
				var all sync.WaitGroup
				var well atomic.Int64
				for range processes {
					db := sql.OpenDB(s)
					defer db.Close()
					db.SetMaxIdleConns(goroutines)
					db.SetMaxOpenConns(most)
					c := calls(db)
					all.Go(func() {
						well.Add(answered(goroutines, time.Minute, func() error { return ping(t.Context(), db, c, 2*time.Second) }))
					})
				}
				all.Wait()
				answers[way] = well.Load()
				time.Sleep(time.Hour)
			})
		}
		if answers["opened apart"] < 3*answers["own"]/2 {
			t.Errorf("pools of %d: %d answers in a minute, by themselves %d", most, answers["opened apart"], answers["own"])
		}
	}
}

// A silent server is asked for few connections, however the time of a call is limited.
func TestOver_ATransactionThatTimesOutDoesNotMakeAPoolWell(t *testing.T) {
	t.Parallel()
	begin := func(ctx context.Context, db *sql.DB, calls *bounded.Calls) error {
		tx, err := boundtx.Begin(ctx, db, oncemill.PostgreSQL, calls, nil)
		if err == nil {
			tx.Rollback()
		}
		return err
	}
	for _, limit := range []time.Duration{2 * time.Second, time.Minute} { // the latter is longer than a BEGIN may take
		apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
			db.SetMaxOpenConns(40)
			d.takes.Store(int64(1000 * time.Hour))
			_ = ping(t.Context(), db, calls, 10*time.Second)
			answered(18, 5*time.Minute, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				return begin(ctx, db, calls)
			})
			return d.attempts.Load()
		})
		if apart > own*4/5 {
			t.Errorf("transactions of %v began %d connections, by themselves %d", limit, apart, own)
		}
	}
}

// stuckDriver does not look at contexts, and accepts no connection.
type stuckDriver struct {
	crowded

	release chan struct{}
	stuck   atomic.Int64
}

func (d *stuckDriver) Connect(context.Context) (driver.Conn, error) {
	d.stuck.Add(1)
	defer d.stuck.Add(-1)
	<-d.release
	return nil, io.ErrUnexpectedEOF
}

// lib/pq without connect_timeout waits for ever for a server that is frozen. Calls that waited for a
// connection do not show that it answers: others are refused soon, as they are without waiting.
func TestOver_ADriverThatNeverReturnsIsNotAskedForEver(t *testing.T) {
	t.Parallel()
	refused := map[string]int64{}
	for way, calls := range map[string]func(*sql.DB) *bounded.Calls{
		"opened apart": func(db *sql.DB) *bounded.Calls { return bounded.Over(db, 5) },
		"own":          func(*sql.DB) *bounded.Calls { return bounded.New(5) },
	} {
		synctest.Test(t, func(t *testing.T) {
			d := &stuckDriver{release: make(chan struct{})}
			db := sql.OpenDB(d)
			c := calls(db)
			ask := func() error { return ping(t.Context(), db, c, 2*time.Second) }
			const goroutines, soon, long = 20, 14 * time.Second, time.Hour
			begun := time.Now()
			var n atomic.Int64
			answered(goroutines, long, func() error {
				if errors.Is(ask(), bounded.ErrTooManyAbandoned) && time.Since(begun) < soon {
					n.Add(1)
				}
				time.Sleep(time.Second)
				return nil
			})
			refused[way] = n.Load()
			if n := d.stuck.Load(); n > 300 {
				t.Errorf("%s: %d connections are being opened", way, n)
			}
			close(d.release)
			_ = db.Close()
		})
	}
	if refused["opened apart"] < refused["own"]*3/4 {
		t.Errorf("of calls to a silent database %d were refused, without waiting %d", refused["opened apart"], refused["own"])
	}
}

// Nothing is left that was begun for calls that have ended, whatever their limit.
func TestOver_NothingIsBegunForEver(t *testing.T) {
	t.Parallel()
	compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		const limit = 10 * time.Hour
		d.takes.Store(int64(2 * limit))
		_ = ping(t.Context(), db, calls, limit) // so that others with this limit wait
		d.takes.Store(int64(50 * time.Minute))
		for range 100 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(2*time.Second, cancel)
			_ = ping(ctx, db, calls, limit)
		}
		time.Sleep(20 * time.Second)
		if n := db.Stats().OpenConnections; n > 0 {
			t.Errorf("%d connections are being opened", n)
		}
		return 0
	})
}
