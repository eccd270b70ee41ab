// Package boundtx runs transactions that end for their caller in bounded time, also
// when the server never answers.
package boundtx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"net"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// ErrUnknown is returned by Commit when the transaction may or may not have
// committed.
var ErrUnknown = errors.New("outcome of the commit is unknown")

const (
	// CommitLimit is how long callers wait for the answer to a COMMIT unless they are
	// configured otherwise. It includes the wait for a synchronous standby.
	CommitLimit = 10 * time.Second

	// beginLimit is how long PostgreSQL may take to answer a BEGIN, and to take a new
	// connection for it. The wait for a connection of a full pool does not count.
	beginLimit = 10 * time.Second

	// commitMost is when a COMMIT that was given up is canceled, which frees its
	// connection. Canceling it earlier would do harm: PostgreSQL then stops waiting for
	// the synchronous standby and shows a commit that a failover can still lose. By
	// this time a failover has long happened.
	commitMost = 5 * time.Minute

	// rollbackLimit is how long a rollback may take before it is left to database/sql.
	rollbackLimit = 2 * time.Second
)

// Tx is a transaction. Its statements go to Raw, by way of Do or Wait.
type Tx struct {
	Raw *sql.Tx

	calls     *bounded.Calls
	line      *bounded.Line   // nil on SQLite
	ctx       context.Context //nolint:containedctx // that of BeginTx, which the drivers commit under
	cancel    context.CancelFunc
	detach    func() bool  // from the caller's context
	why       func() error // the caller's context has ended
	commit    func() error
	end       func()      // rolls back, unless it has ended, and gives back what it holds
	closing   atomic.Bool // Commit or Rollback was called
	ended     atomic.Bool
	abandoned atomic.Bool
}

// Begin begins a transaction. The end of ctx rolls it back until Commit is called;
// from then on it does nothing, so that it does not cancel a COMMIT. A connection that is
// silent costs ten seconds, not all the time that ctx has. On SQLite, which is never
// silent, it waits for the turn to write, for as long as ctx lets it; see
// [sqlitetx.Acquire].
func Begin(ctx context.Context, db *sql.DB, dialect oncemill.Dialect, calls *bounded.Calls, options *sql.TxOptions) (*Tx, error) {
	if dialect == oncemill.SQLite {
		return beginWriter(ctx, db, calls, options)
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &Tx{calls: calls, line: new(bounded.Line), ctx: own, cancel: cancel, detach: context.AfterFunc(ctx, cancel), why: ctx.Err}
	stop := context.AfterFunc(own, t.line.Lose)
	// A transaction that begins too late rolls back: its context has ended.
	limit := beginLimit
	if pool := db.Stats(); pool.MaxOpenConnections > 0 && pool.InUse >= pool.MaxOpenConnections {
		limit = math.MaxInt64
		t.line.Limit(beginLimit, cancel)
	}
	raw, err := bounded.Do(bounded.On(ctx, t.line), calls, limit, func(context.Context) (*sql.Tx, error) { return t.line.BeginTx(own, db, options) })
	if err != nil {
		switch {
		case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, net.ErrClosed)): // its end closes the connection
			err = ctx.Err() // which may be a deadline: own only knows that it was canceled
		case ctx.Err() == nil && own.Err() != nil:
			err = bounded.ErrAbandoned
		}
		cancel()
		t.detach()
		return nil, sqlerr.OfBegin(err)
	}
	t.Raw, t.commit = raw, faulty(ctx, raw.Commit)
	t.end = func() {
		_ = raw.Rollback() // the server rolls back what it lost the connection of
		if stop() {
			t.line.Close()
		}
	}
	return t, nil
}

// beginWriter begins a transaction in its turn. The turn goes on when the transaction has
// ended, whoever has ended it: also when its context did, while a statement or a handler
// that uses it has not returned.
func beginWriter(ctx context.Context, db *sql.DB, calls *bounded.Calls, options *sql.TxOptions) (*Tx, error) {
	w, err := sqlitetx.Acquire(ctx, db, turn.Caller)
	if err != nil {
		return nil, err
	}
	raw, err := w.BeginTx(ctx, options)
	if err != nil {
		w.Release()
		return nil, err
	}
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &Tx{Raw: raw, calls: calls, ctx: own, cancel: cancel, why: ctx.Err, commit: faulty(ctx, w.Commit), end: w.Release}
	t.detach = context.AfterFunc(ctx, cancel)
	context.AfterFunc(own, w.Release)
	return t, nil
}

// Do runs statements of t for at most limit. f must scan what it queries, and return
// everything through its result; see [bounded.Do].
func Do[T any](ctx context.Context, t *Tx, limit time.Duration, f func(ctx context.Context) (T, error)) (T, error) {
	if t.Abandoned() {
		var none T
		return none, bounded.ErrAbandoned
	}
	v, err := bounded.Do(bounded.On(ctx, t.line), t.calls, limit, f)
	return v, t.judge(err)
}

// Wait runs one statement of t, made with ctx, until ctx or the transaction ends.
// What f queries may be read later, since ctx is not a context of Wait's own.
func Wait[T any](ctx context.Context, t *Tx, f func() (T, error)) (T, error) {
	if t.ctx.Err() != nil {
		var none T
		return none, sql.ErrTxDone
	}
	either, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)() //nolint:contextcheck // the transaction has its own
	v, err := bounded.Do(bounded.On(either, t.line), t.calls, math.MaxInt64, func(context.Context) (T, error) { return f() })
	return v, t.judge(err)
}

// Native runs f in t with the connection as the driver made it, until ctx or the transaction
// ends, which also ends the context of f. What f queries must be read when it returns. On
// SQLite the connection is nil.
func Native[T any](ctx context.Context, t *Tx, f func(ctx context.Context, driverConn any) (T, error)) (T, error) {
	if t.line == nil {
		return f(ctx, nil)
	}
	either, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)() //nolint:contextcheck // the transaction has its own
	v, err := bounded.Do(bounded.On(either, t.line), t.calls, math.MaxInt64, func(ctx context.Context) (v T, err error) {
		err = t.line.Raw(func(driverConn any) (err error) {
			// Nothing that ends the transaction can be sent before Raw returns. So what
			// was not ended now is not ended under f, and f runs in the transaction.
			if t.closing.Load() || t.ctx.Err() != nil {
				return sql.ErrTxDone
			}
			v, err = f(ctx, driverConn)
			return err
		})
		return v, err
	})
	return v, t.judge(err)
}

// judge gives the transaction up if a statement of it was abandoned.
func (t *Tx) judge(err error) error {
	if errors.Is(err, bounded.ErrAbandoned) {
		t.abandoned.Store(true)
		t.cancel()
	}
	return err
}

// Abandoned reports that a statement was abandoned.
func (t *Tx) Abandoned() bool { return t.abandoned.Load() }

// Unanswered reports that err, of a statement or of what used it, says nothing about the
// statement: one was abandoned, or had its connection closed for want of an answer.
func (t *Tx) Unanswered(err error) bool {
	return t.Abandoned() || t.line.HungUp() && (errors.Is(err, net.ErrClosed) || errors.Is(err, driver.ErrBadConn))
}

// Commit commits, and waits for the answer for at most limit, even if the context of
// Begin ends meanwhile. If that had ended before, its error is returned and the
// transaction is rolled back. The error is [ErrUnknown] if the transaction may have
// committed.
func (t *Tx) Commit(limit time.Duration) error {
	t.closing.Store(true)
	if !t.detach() {
		t.Rollback()
		return fmt.Errorf("commit: %w", t.why())
	}
	if t.Abandoned() { // judge has ended it
		t.Rollback()
		return fmt.Errorf("commit: %w", bounded.ErrAbandoned)
	}
	_, err := bounded.Do(bounded.Committing(context.WithoutCancel(t.ctx), t.line), t.calls, limit, func(context.Context) (struct{}, error) {
		cut := time.AfterFunc(commitMost, t.cancel)
		defer cut.Stop()
		defer t.cancel()
		defer t.end()
		return struct{}{}, t.commit()
	})
	if errors.Is(err, bounded.ErrTooManyAbandoned) { // it was not sent
		t.Rollback()
		return fmt.Errorf("commit: %w", err)
	}
	t.ended.Store(true)
	switch {
	case err == nil:
		return nil
	case sqlerr.CommitUnknown(err):
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return fmt.Errorf("commit: %w", err)
}

// Rollback rolls back, unless the transaction has ended.
func (t *Tx) Rollback() {
	t.closing.Store(true)
	if t.ended.Swap(true) {
		return
	}
	defer t.cancel() // database/sql rolls back what has not been
	t.detach()
	if t.ctx.Err() != nil {
		return
	}
	_, _ = bounded.Do(bounded.On(context.WithoutCancel(t.ctx), t.line), t.calls, rollbackLimit, func(limited context.Context) (struct{}, error) {
		defer context.AfterFunc(limited, t.cancel)()
		t.end()
		return struct{}{}, nil
	})
}
