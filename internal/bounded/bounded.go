// Package bounded runs calls that may never return.
//
// A database driver may stay blocked in a network read after its context has ended.
// lib/pq does so until the server answers. A frozen server, or one behind a network that
// drops packets, never answers. [Do] returns to its caller in these cases too.
package bounded

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

var (
	// ErrAbandoned is returned for a call that did not return in time. Its outcome is
	// unknown: it may still take effect.
	ErrAbandoned = fmt.Errorf("no answer in time, call abandoned: %w", context.DeadlineExceeded)

	// ErrTooManyAbandoned is returned for a call that was not made, because too many
	// abandoned calls have not returned.
	ErrTooManyAbandoned = errors.New("too many abandoned calls have not returned")

	// ErrFull is returned for a transaction that waited to begin until its pool had become full, which
	// may take longer than its limit. Begin it again.
	ErrFull = errors.New("the pool is full")

	// ErrNotReturned is returned by [Call] for a function that did not return in time.
	ErrNotReturned = errors.New("it has not returned")

	errNotCalled = errors.New("not called: too many calls before it have not returned")

	errEnded = errors.New("the call ended its goroutine")
)

// Silence reports whether a call had no answer in time.
func Silence(err error) bool {
	return errors.Is(err, ErrTooManyAbandoned) || errors.Is(err, context.DeadlineExceeded)
}

// unanswered reports whether a call had no answer in time, or no connection.
func unanswered(err error) bool { return err != nil && (Silence(err) || sqlerr.Connection(err)) }

// grace is how long a call may take to return after its context has ended. In this time
// the driver cancels the statement and reads the server's answer.
const grace = time.Second

// Calls limits how many abandoned calls exist at a time. The zero value is not
// usable; see [New].
//
// At the limit calls are refused, except a few at a time that test whether the database
// answers again: a pool may hold many dead connections, and opens new ones once those are
// used up. The first answer admits calls again.
type Calls struct {
	most   int
	grace  time.Duration
	opener *opener // nil: none

	mu        sync.Mutex // guards the fields below
	abandoned int
	allowed   int            // abandoned calls; grows while other calls get answers
	trials    int            // calls in progress beyond allowed
	idle      chan struct{}  // closed when abandoned goes back to 0; nil while it is 0
	hungUp    int            // abandoned commits whose connections were closed since a commit was last answered
	commits   map[*Line]bool // connections of the other abandoned commits
}

const (
	// mostTrials is how many calls at a time may test whether the database answers again.
	mostTrials = 4

	// mostOfAll bounds the number of abandoned calls.
	mostOfAll = 256
)

// New returns Calls that refuse further calls once most calls are abandoned, except those
// that test for answers. At most 256 calls are abandoned, plus those in progress at that
// moment. Each holds a goroutine and a connection until the driver returns.
func New(most int) *Calls {
	return &Calls{most: most, allowed: most, grace: grace, commits: map[*Line]bool{}}
}

// Over is [New] for calls that use a pool. After one that had no answer or no connection, calls open
// no connection for which they have no time; see opener.
func Over(db *sql.DB, most int) *Calls {
	c := New(most)
	c.opener = &opener{db: db}
	return c
}

// admit decides whether a call may be made, and whether it is a trial.
func (c *Calls) admit() (trial bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.abandoned < c.allowed:
		return false, nil
	case c.trials < mostTrials && c.abandoned < mostOfAll:
		c.trials++
		return true, nil
	}
	return false, ErrTooManyAbandoned
}

// tried records the end of a trial.
func (c *Calls) tried(answered bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trials--
	if answered {
		c.allowed = min(c.abandoned+c.most, mostOfAll)
	}
}

// Abandoned returns the number of calls that were abandoned and have not returned.
func (c *Calls) Abandoned() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.abandoned
}

// Idle returns a channel that is closed when no abandoned call is left.
func (c *Calls) Idle() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil {
		return c.idle
	}
	closed := make(chan struct{})
	close(closed)
	return closed
}

// Do calls f with a context that ends after limit, or with ctx, and returns f's result. If
// f has not returned a second after that, Do returns [ErrAbandoned] and drops f's result.
// So f must return everything in its result, and must not write to anything that the
// caller reads. A panic of f panics in the caller, with an [*oncemill.PanicError]. If f ends its
// goroutine (runtime.Goexit), that is an error.
//
// The connection of an abandoned call is not used again. The driver closes it, since its
// context ended during a statement, or Do closes the call's [Line].
func Do[T any](ctx context.Context, c *Calls, limit time.Duration, f func(ctx context.Context) (T, error)) (v T, err error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	u, _ := ctx.Value(lineKey{}).(use)
	mayConnect := c.opener != nil && (!u.given || u.begin)
	var waited atomic.Bool // for a connection, so that less than its time was left
	if mayConnect {
		begun, given := time.Now(), limit
		if end, ok := ctx.Deadline(); ok {
			given = min(given, time.Until(end))
		}
		defer func() {
			switch ended := ctx.Err(); {
			case err == nil || waited.Load() || errors.Is(ended, context.Canceled):
			case ended != nil || Silence(err):
				c.opener.failed(given)
			case unanswered(err): // which shows only that less time would not do
				c.opener.failed(min(given, time.Since(begun)))
			}
		}()
	}
	trial, err := c.admit()
	if err != nil {
		return none, err
	}
	answered := false
	if trial {
		defer func() { c.tried(answered) }()
	}
	type result struct {
		value    T
		err      error
		panicked *oncemill.PanicError // with the stack of f, which the caller's stack lacks
		returned bool
		inVain   bool // it only waited, for a connection
	}
	own := use{}
	if !u.given {
		own.line = new(Line)
		u = own
	}
	limited, cancel := context.WithTimeout(context.WithValue(ctx, lineKey{}, own), limit)
	done := make(chan result, 1)
	go func() {
		defer cancel()
		var r result
		defer func() {
			if !r.returned {
				r.panicked = &oncemill.PanicError{Value: recover(), Stack: debug.Stack()}
			}
			own.line.Close()
			done <- r
		}()
		if mayConnect {
			tries, late := c.opener.ready(limited)
			waited.Store(late)
			if r.err = limited.Err(); r.err == nil && late && !tries && u.begin && c.opener.full() {
				r.err = ErrFull
			}
			if r.err != nil {
				r.returned, r.inVain = true, true
				return
			}
			if tries {
				defer func() {
					// f may have seen the end of ctx before limited did.
					if ctx.Err() == nil && limited.Err() == nil {
						c.opener.tried(r.returned && !unanswered(r.err))
					}
				}()
			}
		}
		r.value, r.err = f(limited)
		r.returned = true
	}()
	take := func(r result) (T, error) {
		answered = !r.inVain
		switch {
		case r.returned:
		case r.panicked.Value == nil: // panic(nil) has a value
			return none, errEnded
		default:
			panic(r.panicked) // where the caller's own deferred functions see it
		}
		if u.commit && r.err == nil {
			c.committed()
		}
		return r.value, r.err
	}
	select {
	case r := <-done:
		return take(r)
	case <-limited.Done():
	}
	timer := time.NewTimer(c.grace)
	defer timer.Stop()
	select {
	case r := <-done:
		return take(r)
	case <-timer.C:
	}
	c.abandon()
	go func() {
		c.hangUp(u)
		<-done
		c.returned(u.line)
	}()
	return none, ErrAbandoned
}

// Call calls f, a user's function, as [Do] does. That f panics or ends its goroutine is an
// error. [ErrNotReturned] says nothing about a database.
func Call(ctx context.Context, c *Calls, limit time.Duration, f func(ctx context.Context) error) error {
	type result struct{ err error }
	r, err := Do(ctx, c, limit, func(ctx context.Context) (result, error) {
		return result{nopanic.Call(func() error { return f(ctx) })}, nil
	})
	switch {
	case err == nil:
		return r.err
	case errors.Is(err, ErrAbandoned):
		return ErrNotReturned
	case errors.Is(err, ErrTooManyAbandoned):
		return errNotCalled
	}
	return err
}

func (c *Calls) abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.abandoned++; c.idle == nil {
		c.idle = make(chan struct{})
	}
}

func (c *Calls) returned(l *Line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.commits, l)
	if c.abandoned--; c.abandoned == 0 {
		close(c.idle)
		c.idle = nil
	}
	c.allowed = max(c.most, min(c.allowed, c.abandoned+c.most))
}

// hangUp closes the connection of an abandoned call.
func (c *Calls) hangUp(u use) {
	if u.commit && !c.mayHangUp(u.line) {
		return
	}
	u.line.hangUp()
}

// mayHangUp reports whether to close the connection of an abandoned commit now.
func (c *Calls) mayHangUp(l *Line) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hungUp == mostTrials {
		c.commits[l] = true
		return false
	}
	c.hungUp++
	return true
}

// committed records that a commit was answered. Earlier commits without an answer will not
// get one, so their connections are closed.
func (c *Calls) committed() {
	c.mu.Lock()
	if c.hungUp == 0 {
		c.mu.Unlock()
		return
	}
	lines := c.commits
	c.hungUp, c.commits = 0, map[*Line]bool{}
	c.mu.Unlock()
	for l := range lines {
		go l.hangUp() // may block
	}
}
