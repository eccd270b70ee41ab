// Package boundtx runs transactions that return to their caller in bounded time, even if
// the server never answers.
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
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// ErrUnknown is returned by Commit when the transaction may or may not have
// committed.
var ErrUnknown = errors.New("no answer to COMMIT")

const (
	// CommitLimit is how long callers wait for the answer to a COMMIT unless they are
	// configured otherwise. It includes the wait for a synchronous standby.
	CommitLimit = 10 * time.Second

	// beginLimit is how long PostgreSQL may take to accept a connection and to answer a
	// BEGIN. The wait for a connection of a full pool does not count.
	beginLimit = 10 * time.Second

	// commitMost is when an abandoned COMMIT is canceled, which frees its connection.
	// It must be long: PostgreSQL then stops waiting for the synchronous standby and
	// shows a commit that a failover can still lose. After this time a failover has long
	// happened.
	commitMost = 5 * time.Minute

	// rollbackLimit is how long a rollback may take before it is left to database/sql.
	rollbackLimit = 2 * time.Second
)

// Tx is a transaction. Run its statements on Raw inside [Do], [Wait] or [Native].
type Tx struct {
	Raw *sql.Tx

	calls     *bounded.Calls
	line      *bounded.Line   // nil on SQLite
	ctx       context.Context //nolint:containedctx // of BeginTx; the drivers commit under it
	cancel    context.CancelFunc
	detach    func() bool  // detaches from the caller's context
	why       func() error // why the caller's context has ended
	commit    func() error
	end       func()      // rolls back, unless it has ended, and releases its connection
	closing   atomic.Bool // Commit or Rollback was called
	ended     atomic.Bool
	abandoned atomic.Bool
}

// Begin begins a transaction. The end of ctx rolls it back until Commit is called. After
// that it has no effect, so it cancels no COMMIT. A silent connection costs a second, since
// another is tried then, and a silent server ten, not all the time until ctx ends. On SQLite,
// Begin waits for the turn to write until ctx ends; see [sqlitetx.Acquire].
func Begin(ctx context.Context, db *sql.DB, dialect oncemill.Dialect, calls *bounded.Calls, options *sql.TxOptions) (*Tx, error) {
	if dialect == oncemill.SQLite {
		return beginWriter(ctx, db, calls, options)
	}
	for {
		t, err := begin(ctx, db, calls, options)
		if !errors.Is(err, bounded.ErrFull) {
			return t, err
		}
	}
}

func begin(ctx context.Context, db *sql.DB, calls *bounded.Calls, options *sql.TxOptions) (*Tx, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &Tx{calls: calls, line: new(bounded.Line), ctx: own, cancel: cancel, detach: context.AfterFunc(ctx, cancel), why: ctx.Err}
	stop := context.AfterFunc(own, t.line.Lose)
	// A transaction that begins too late rolls back: its context has ended.
	limit := beginLimit
	if bounded.Full(db.Stats()) {
		limit = math.MaxInt64
		t.line.Limit(beginLimit, cancel)
	}
	raw, err := bounded.Do(bounded.Beginning(ctx, t.line), calls, limit, func(context.Context) (*sql.Tx, error) { return t.line.BeginTx(own, db, options) })
	if err != nil {
		switch {
		case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, net.ErrClosed)): // the end of ctx closes the connection
			err = ctx.Err() // may be a deadline; own.Err is always Canceled
		case ctx.Err() == nil && own.Err() != nil:
			err = bounded.ErrAbandoned
		}
		cancel()
		t.detach()
		return nil, sqlerr.OfBegin(err)
	}
	t.Raw, t.commit = raw, faulty(ctx, raw.Commit)
	t.end = func() {
		_ = raw.Rollback() // without a connection the server rolls back by itself
		if stop() {
			t.line.Close()
		}
	}
	return t, nil
}

// beginWriter begins a transaction when it has the turn to write. The turn passes on when
// the transaction ends, also by its context while a statement or a handler still runs.
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

// Do runs statements of t for at most limit. f must read its results and return everything
// in its result; see [bounded.Do].
func Do[T any](ctx context.Context, t *Tx, limit time.Duration, f func(ctx context.Context) (T, error)) (T, error) {
	if t.Abandoned() {
		var none T
		return none, bounded.ErrAbandoned
	}
	v, err := bounded.Do(bounded.On(ctx, t.line), t.calls, limit, f)
	return v, t.judge(err)
}

// Wait runs one statement of t, made with ctx, until ctx or the transaction ends. The rows
// that f returns may be read later, since the statement uses ctx.
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

// Native runs f in t with the driver's own connection, until ctx or the transaction ends,
// which also ends the context of f. f must read its results before it returns. On SQLite
// the connection is nil.
func Native[T any](ctx context.Context, t *Tx, f func(ctx context.Context, driverConn any) (T, error)) (T, error) {
	if t.line == nil {
		return f(ctx, nil)
	}
	either, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)() //nolint:contextcheck // the transaction has its own
	v, err := bounded.Do(bounded.On(either, t.line), t.calls, math.MaxInt64, func(ctx context.Context) (v T, err error) {
		err = t.line.Raw(func(driverConn any) (err error) {
			// Nothing that ends the transaction can be sent before Raw returns. So a
			// transaction that is open now stays open while f runs.
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

// judge cancels the transaction if one of its statements was abandoned.
func (t *Tx) judge(err error) error {
	if errors.Is(err, bounded.ErrAbandoned) {
		t.abandoned.Store(true)
		t.cancel()
	}
	return err
}

// Abandoned reports whether a statement was abandoned.
func (t *Tx) Abandoned() bool { return t.abandoned.Load() }

// Unanswered reports whether err is not about the statement that failed: a statement was
// abandoned, or its connection was closed because there was no answer.
func (t *Tx) Unanswered(err error) bool {
	return t.Abandoned() || t.line.HungUp() && (errors.Is(err, net.ErrClosed) || errors.Is(err, driver.ErrBadConn))
}

// Commit commits, and waits for the answer for at most limit, even if the context of
// Begin ends meanwhile. If that context had ended before, Commit rolls back and returns
// its error. The error is [ErrUnknown] if the transaction may have committed.
func (t *Tx) Commit(limit time.Duration) error {
	t.closing.Store(true)
	if !t.detach() {
		t.Rollback()
		return fmt.Errorf("commit: %w", t.why())
	}
	if t.Abandoned() { // judge has canceled it
		t.Rollback()
		return fmt.Errorf("commit: %w", bounded.ErrAbandoned)
	}
	crashpoint.Reach(crashpoint.BeforeCommit)
	_, err := bounded.Do(bounded.Committing(context.WithoutCancel(t.ctx), t.line), t.calls, limit, func(context.Context) (struct{}, error) {
		cut := time.AfterFunc(commitMost, t.cancel)
		defer cut.Stop()
		defer t.cancel()
		defer t.end()
		return struct{}{}, t.commit()
	})
	if errors.Is(err, bounded.ErrTooManyAbandoned) { // not sent
		t.Rollback()
		return fmt.Errorf("commit: %w", err)
	}
	t.ended.Store(true)
	switch {
	case err == nil:
		crashpoint.Reach(crashpoint.AfterCommit)
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
	defer t.cancel() // database/sql rolls back if that has not happened
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
