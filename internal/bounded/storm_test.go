package bounded_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
)

// busyServer accepts one connection after the other, in the order in which they were begun, and
// takes as long for those that were given up meanwhile. (PostgreSQL forks for each, and finds out only
// when it writes to it.)
type busyServer struct {
	d       crowded // what connections of it do
	each    time.Duration
	timeout time.Duration // of connections, as clients are configured

	mu       sync.Mutex
	free     time.Time // when all that wait are accepted; guarded by mu
	attempts atomic.Int64
	silent   atomic.Bool // accepts nothing
}

// outage is how long a new busyServer is silent.
const outage = 5 * time.Second

// newBusyServer returns a server that accepts 36 connections a second.
func newBusyServer(timeout time.Duration) *busyServer {
	s := &busyServer{each: time.Second / 36, timeout: timeout}
	s.silent.Store(true)
	time.AfterFunc(outage, func() { s.silent.Store(false) })
	return s
}

func (s *busyServer) Driver() driver.Driver { return &s.d }

func (s *busyServer) Connect(ctx context.Context) (driver.Conn, error) {
	s.attempts.Add(1)
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if s.silent.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s.mu.Lock()
	if now := time.Now(); s.free.Before(now) {
		s.free = now
	}
	s.free = s.free.Add(s.each)
	accepted := s.free
	s.mu.Unlock()
	select {
	case <-time.After(time.Until(accepted)):
		return &crowdedConn{brokenConn: brokenConn{1}, d: &s.d}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// After a failover, ten processes of eighteen goroutines connect to a server that accepts 36
// connections a second: it needs five seconds for all, and calls give up after two. Each goroutine keeps
// the connection that it gets.
func TestOver_ABusyServerSoonHasAllItsClients(t *testing.T) {
	t.Parallel()
	const processes, callers, limit, soon = 10, 18, 2 * time.Second, 45 * time.Second
	storm := func(t *testing.T, way func(*sql.DB) *bounded.Calls, pool int, timeout time.Duration) (connected, attempts int64) {
		synctest.Test(t, func(t *testing.T) {
			s := newBusyServer(timeout)
			ctx, cancel := context.WithTimeout(t.Context(), outage+soon)
			defer cancel()
			var all sync.WaitGroup
			var well atomic.Int64
			for range processes {
				db := sql.OpenDB(s)
				defer db.Close()
				db.SetMaxOpenConns(pool)
				db.SetMaxIdleConns(callers)
				calls := way(db)
				for range callers {
					all.Go(func() {
						for ctx.Err() == nil {
							time.Sleep(rand.N(200 * time.Millisecond))
							conn, err := bounded.Do(ctx, calls, limit, func(ctx context.Context) (*sql.Conn, error) { return db.Conn(ctx) })
							if err == nil {
								well.Add(1)
								<-ctx.Done()
								_ = conn.Close()
							}
						}
					})
				}
			}
			all.Wait()
			connected, attempts = well.Load(), s.attempts.Load()
			time.Sleep(time.Hour) // what was begun ends
		})
		return connected, attempts
	}
	for _, pool := range []int{0, callers, 2 * callers} {
		for _, timeout := range []time.Duration{time.Minute, 3 * time.Second} {
			apart, attempts := storm(t, ways["opened apart"], pool, timeout)
			own, ownAttempts := storm(t, ways["own"], pool, timeout)
			t.Logf("pools of %d, connect timeout %v: %d connected in %d attempts, by themselves %d in %d", pool, timeout, apart, attempts, own, ownAttempts)
			if apart != processes*callers {
				t.Errorf("pools of %d, connect timeout %v: %d of %d were connected after %v", pool, timeout, apart, processes*callers, soon)
			}
			if own == processes*callers {
				t.Error("this server is not busy enough to need help")
			}
		}
	}
}
