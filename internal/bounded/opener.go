package bounded

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

const (
	// openLimit is how long opening a connection may take.
	openLimit = 15 * time.Second

	// After a connection could not be opened, calls fail at once for this long: openPause at
	// first, twice as long after each further failure, openPauseMost at most.
	openPause     = 50 * time.Millisecond
	openPauseMost = time.Second

	// openLook is how often calls that wait look for an idle connection.
	openLook = 10 * time.Millisecond
)

// opener opens the connections that a pool lacks after a call without an answer.
//
// To open one may take longer than a call: of several addresses the first may be silent, and a
// server that has just become the primary has many clients to accept. A connection that is given
// up half-way costs the server nearly as much as one that is used, and whoever gave it up begins
// anew. So a server whose clients have short limits might stay busy for ever, and none of
// them ever be connected.
//
// Therefore it opens them one after the other, each on behalf of all calls that wait, and goes on
// when these have given up. A call takes an idle connection, even one that may be dead, if none of the
// others is about to. Nor does it wait if the pool may open no further one: then the pool makes it
// wait.
type opener struct {
	db    *sql.DB
	calls *Calls

	mu       sync.Mutex // guards the fields below
	doubtful bool       // a call had no answer, and not all that waited since have got a connection
	waiting  int
	looked   time.Time // when idle connections were counted
	handed   int       // how many of them were handed out since
	fresh    bool      // a connection was opened, and not handed out yet
	opening  *opening  // in progress; nil: none is
	failures int       // in a row
	closed   time.Time // calls fail until then, with failure
	failure  error
}

// opening is a connection that is being opened.
type opening struct {
	done chan struct{} // closed at its end
	err  error         // guarded by the opener
}

// doubt notes that a call had no answer.
func (o *opener) doubt() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.doubtful = true
}

// await waits until the pool should have a connection for the caller.
func (o *opener) await(ctx context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting++
	defer func() { o.waiting-- }()
	for o.doubtful && !o.handOut() {
		current := o.opening
		if current == nil {
			if time.Now().Before(o.closed) {
				return o.failure
			}
			current = o.begin(ctx)
		}
		o.mu.Unlock()
		look := time.NewTimer(openLook)
		select {
		case <-current.done:
		case <-look.C:
		case <-ctx.Done():
		}
		look.Stop()
		o.mu.Lock()
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("no connection to the database yet: %w", ctx.Err())
		case current.err != nil:
			return o.failure
		}
	}
	o.doubtful = o.doubtful && o.waiting > 1
	return nil
}

// handOut reports whether the caller may take a connection from the pool: there is an idle one that
// nobody else was told of, or one was opened (a pool may keep none idle), or the pool makes it wait.
func (o *opener) handOut() bool {
	pool := o.db.Stats()
	if pool.MaxOpenConnections > 0 && pool.InUse >= pool.MaxOpenConnections {
		return true
	}
	if now := time.Now(); now.Sub(o.looked) >= openLook {
		o.looked, o.handed = now, 0
	}
	if !o.fresh && o.handed >= pool.Idle {
		return false
	}
	o.handed++
	o.fresh = false
	return true
}

// begin begins to open a connection. Callers hold the mutex.
func (o *opener) begin(ctx context.Context) *opening {
	current := &opening{done: make(chan struct{})}
	o.opening = current
	apart := context.WithValue(context.WithoutCancel(ctx), lineKey{}, use{}) // from the caller's limit and line
	go func() {
		_, err := do(apart, o.calls, openLimit, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, open(ctx, o.db)
		})
		o.mu.Lock()
		defer o.mu.Unlock()
		o.opening, current.err = nil, err
		if err == nil {
			o.failures, o.fresh = 0, true
		} else {
			o.failures++
			pause := min(openPause<<min(o.failures-1, 8), openPauseMost)
			o.closed = time.Now().Add(pause/2 + rand.N(pause)) // not all processes at once
			o.failure = fmt.Errorf("connect to the database: %w", err)
		}
		close(current.done)
	}()
	return current
}

// open opens a connection and returns it to the pool. If the pool has got another one meanwhile,
// which is silent, it is dropped.
func open(ctx context.Context, db *sql.DB) error {
	for wait := patience; ; wait = 0 {
		var l Line
		_, silent, err := l.take(ctx, db, wait)
		if !silent {
			l.Close()
			return err
		}
		dropIdle(ctx, db)
	}
}

// unanswered reports whether an error of a call says that its connection may be of no use.
func unanswered(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && (Silence(err) || sqlerr.Connection(err))
}
