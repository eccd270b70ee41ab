package bounded_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
)

// Calls for which connections are opened apart are compared with calls that open their own.
var ways = map[string]func(*sql.DB) *bounded.Calls{
	"opened apart": func(db *sql.DB) *bounded.Calls { return bounded.Over(db, 100) },
	"own":          func(*sql.DB) *bounded.Calls { return bounded.New(100) },
}

// compare runs a test once in each way, in a bubble, and returns what it returned.
func compare(t *testing.T, test func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64) (apart, own int64) {
	results := map[string]int64{}
	for way, calls := range ways {
		synctest.Test(t, func(t *testing.T) {
			d := &crowded{}
			db := sql.OpenDB(d)
			results[way] = test(t, d, db, calls(db))
			_ = db.Close()
			time.Sleep(time.Hour) // what was begun ends
		})
	}
	return results["opened apart"], results["own"]
}

// ping is a call.
func ping(ctx context.Context, db *sql.DB, calls *bounded.Calls, limit time.Duration) error {
	_, err := bounded.Do(ctx, calls, limit, func(ctx context.Context) (struct{}, error) { return struct{}{}, db.PingContext(ctx) })
	return err
}

// The attempts of an outage may never end.
func TestOver_NobodyWaitsForAttemptsOfTheOutage(t *testing.T) {
	t.Parallel()
	const callers, limit, outage = 10, 5 * time.Second, 12 * time.Second
	apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		d.silent.Store(1 << 30)
		begun := time.Now()
		time.AfterFunc(outage, func() { d.silent.Store(0) })
		var last atomic.Int64
		var all sync.WaitGroup
		for n := range callers {
			all.Go(func() {
				time.Sleep(time.Duration(n) * 300 * time.Millisecond)
				for ping(t.Context(), db, calls, limit) != nil {
				}
				last.Store(max(last.Load(), int64(time.Since(begun))))
			})
		}
		all.Wait()
		return last.Load()
	})
	if late := time.Duration(apart - own); late > time.Second {
		t.Errorf("all are connected after %v, %v later than by themselves", time.Duration(apart), late)
	}
}

// A call may take longer than an attempt that is begun apart for others.
func TestOver_AConnectionMayTakeAsLongAsItsCall(t *testing.T) {
	t.Parallel()
	apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		d.takes.Store(int64(time.Hour))
		_ = ping(t.Context(), db, calls, 500*time.Millisecond)
		d.takes.Store(int64(20 * time.Second))
		_ = ping(t.Context(), db, calls, 500*time.Millisecond) // leaves an attempt
		begun := time.Now()
		if err := ping(t.Context(), db, calls, 30*time.Second); err != nil {
			t.Error(err)
		}
		return int64(time.Since(begun))
	})
	if late := time.Duration(apart - own); late > time.Second {
		t.Errorf("connected after %v, by itself after %v", time.Duration(apart), time.Duration(own))
	}
}

// What is opened apart from calls takes no more of a small pool than a part.
func TestOver_ASilentServerDoesNotTakeASmallPool(t *testing.T) {
	t.Parallel()
	for _, most := range []int{1, 3, 8} {
		apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
			db.SetMaxOpenConns(most)
			db.SetMaxIdleConns(most)
			db.SetConnMaxLifetime(100 * time.Millisecond)
			d.deaf.Store(3) // one attempt of three
			d.answers.Store(int64(10 * time.Millisecond))
			var answers atomic.Int64
			var all sync.WaitGroup
			for range most {
				all.Go(func() {
					for begun := time.Now(); time.Since(begun) < time.Minute; time.Sleep(5 * time.Millisecond) {
						if ping(t.Context(), db, calls, 400*time.Millisecond) == nil {
							answers.Add(1)
						}
					}
				})
			}
			all.Wait()
			return answers.Load()
		})
		t.Logf("a pool of %d: %d answers, by itself %d", most, apart, own)
		if apart < own*3/4 {
			t.Errorf("a pool of %d had %d answers, by itself %d", most, apart, own)
		}
	}
}

// Calls of a pool with few places open their own connections, one after the other, until that goes well.
func TestOver_ASmallPoolRecovers(t *testing.T) {
	t.Parallel()
	for _, most := range []int{1, 3, 8} {
		apart, own := compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
			db.SetMaxOpenConns(most)
			db.SetMaxIdleConns(-1) // each call opens one
			d.takes.Store(int64(time.Hour))
			_ = ping(t.Context(), db, calls, time.Second)
			time.Sleep(time.Minute)
			d.takes.Store(int64(100 * time.Millisecond))
			begun := time.Now()
			var all sync.WaitGroup
			for range most {
				all.Go(func() {
					for range 50 {
						if err := ping(t.Context(), db, calls, time.Second); err != nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			return int64(time.Since(begun))
		})
		if late := time.Duration(apart - own); late > time.Second {
			t.Errorf("a pool of %d took %v longer than by itself", most, late)
		}
	}
}

func TestOver_AClosedPoolSaysSo(t *testing.T) {
	t.Parallel()
	compare(t, func(t *testing.T, d *crowded, db *sql.DB, calls *bounded.Calls) int64 {
		d.takes.Store(int64(time.Hour))
		_ = ping(t.Context(), db, calls, time.Second)
		_ = db.Close()
		begun := time.Now()
		if err := ping(t.Context(), db, calls, time.Second); err == nil || errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != 0 {
			t.Errorf("got %v after %v", err, time.Since(begun))
		}
		return 0
	})
}
