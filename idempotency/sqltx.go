package idempotency

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// TxFromContext returns the transaction of the request or command that ctx belongs to. An
// answer below 400 commits it; any other rolls back. After the handler has returned,
// statements fail with [ErrTxEnded]. oncemill.TxFromContext returns the same transaction
// there, so a context-bound outbox publisher writes in it. Without one (the handler is
// behind Middleware, not TxMiddleware) it returns nil and false.
func TxFromContext(ctx context.Context) (oncemill.Tx, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	if t, ok := tx.(*sqlTx); ok {
		return t, true
	}
	return nil, false
}

// sqlTx is the transaction in which a handler runs.
type sqlTx struct {
	*txhandle.Handle
	store *SQLStore
	own   *boundtx.Tx
	id    ID
	owner Owner

	grouped   bool        // it shares its transaction
	failed    atomic.Bool // a statement of the handler failed
	contended atomic.Bool // one lost against another transaction
	rows      handlerRows
}

// begin begins a transaction for the owner of a claim. The database refuses to commit it
// unless complete has removed its seal. PostgreSQL ends it when no statement is sent in it
// for idle.
func (s *SQLStore) begin(ctx context.Context, id ID, owner Owner, isolation sql.IsolationLevel, idle time.Duration) (*sqlTx, error) {
	t, err := s.beginPlain(ctx, isolation)
	if err != nil {
		return nil, err
	}
	t.id, t.owner = id, owner
	t.Handle = txhandle.New(t.own, t.own.Raw, s.where.Dialect, ErrTxEnded, t.lost)
	err = t.step(ctx, func(ctx context.Context) error {
		if err := s.keys.Seal(ctx, t.own.Raw, keystore.SealLimits{Idle: idle}); err != nil {
			return fmt.Errorf("begin: seal: %w", err)
		}
		return t.sealClaim(ctx)
	})
	if err != nil {
		t.rollback()
		return nil, err
	}
	return t, nil
}

// beginPlain begins a transaction that belongs to no claim and has no seal.
func (s *SQLStore) beginPlain(ctx context.Context, isolation sql.IsolationLevel) (*sqlTx, error) {
	own, err := s.keys.Begin(ctx, isolation)
	if err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	t := &sqlTx{store: s, own: own}
	t.Handle = txhandle.New(own, own.Raw, s.where.Dialect, ErrTxEnded, func(context.Context, error) error { return nil })
	return t, nil
}

// QueryContext is like that of *sql.Tx.
func (t *sqlTx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	rows, err := t.Handle.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	t.rows.opened(rows)
	return rows, nil
}

// QueryRowContext is like that of *sql.Tx.
func (t *sqlTx) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	row := t.Handle.QueryRowContext(ctx, query, args...)
	t.rows.openedOne(row)
	return row
}

// closeRows closes what the handler has left open, as database/sql does at a commit. The
// handler has returned, and its context has not ended.
func (t *sqlTx) closeRows(ctx context.Context) {
	if closeAll := t.rows.takeOpen(); closeAll != nil {
		_ = t.step(ctx, func(context.Context) error { // the next statement reports what goes wrong
			closeAll()
			return nil
		})
	}
}

// step runs the store's own statements in the transaction.
func (t *sqlTx) step(ctx context.Context, do func(ctx context.Context) error) error {
	_, err := boundtx.Do(ctx, t.own, stepLimit, func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx) })
	return err
}

func (t *sqlTx) sealClaim(ctx context.Context) error {
	owned, enforced, err := t.store.keys.SealClaim(ctx, t.own.Raw, keystore.ID(t.id), keystore.Owner(t.owner))
	switch {
	case err != nil:
		return fmt.Errorf("begin: seal: %w", err)
	case !owned:
		return ErrStaleOwner
	case !enforced:
		return ErrUnsealed
	}
	return nil
}

// complete is the last statement: it completes the claim and permits the database to
// commit. ErrStaleOwner means that the claim belongs to another owner, or that the handler
// has ended the transaction.
func (t *sqlTx) complete(ctx context.Context, c Completion) error {
	return t.step(ctx, func(ctx context.Context) error {
		owned, err := t.store.keys.Finish(ctx, t.own.Raw, keystore.ID(t.id), keystore.Owner(t.owner), c.asKey())
		switch {
		case err != nil:
			return fmt.Errorf("complete key: %w", sqlerr.OfSeal(err))
		case !owned:
			return ErrStaleOwner
		}
		return nil
	})
}

// commit waits for the answer even if the context of the request ends meanwhile. The
// error is boundtx.ErrUnknown if the transaction may have committed.
func (t *sqlTx) commit() error {
	return t.own.Commit(boundtx.CommitLimit)
}

// rollback is a no-op after the commit.
func (t *sqlTx) rollback() {
	t.own.Rollback()
}

// aborted reports whether a statement has failed, including one that the handle does not
// see: one that the handler prepared, or whose rows it read.
func (t *sqlTx) aborted(ctx context.Context) bool {
	if !t.Used() {
		return false
	}
	aborted, err := boundtx.Do(ctx, t.own, stepLimit, func(ctx context.Context) (bool, error) {
		return t.store.keys.Aborted(ctx, t.own.Raw), nil
	})
	return aborted || err != nil
}

// lost finds out whether a failed statement also ended the transaction.
func (t *sqlTx) lost(ctx context.Context, err error) error {
	t.failed.Store(true)
	if sqlerr.Retryable(err) || t.grouped && sqlerr.LockTimedOut(err) {
		t.contended.Store(true)
	}
	switch t.store.keys.AfterFailure(ctx, t.own.Raw, keystore.ID(t.id), err) {
	case keystore.TxSealed:
		return fmt.Errorf("%w (or it has set all constraints immediate: name those that are meant): %w", oncemill.ErrTxOwned, err)
	case keystore.TxGone:
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	case keystore.TxOpen:
	}
	return nil
}

// sqlGroup is a transaction that several handlers share.
type sqlGroup struct {
	*sqlTx
	statements txhandle.Statements
	end        func() error
}

// groupLock is how long a statement of a group waits for a lock. It is well below
// PostgreSQL's deadlock_timeout, since another group may be waiting for this one.
const groupLock = 100 * time.Millisecond

// beginGroup begins a transaction for n handlers. It is sealed like that of one handler.
func (s *SQLStore) beginGroup(ctx context.Context, isolation sql.IsolationLevel, idle time.Duration, repeats *txhandle.Repeats, n int) (*sqlGroup, error) {
	t, err := s.beginPlain(ctx, isolation)
	if err != nil {
		return nil, err
	}
	err = t.step(ctx, func(ctx context.Context) error {
		return s.keys.Seal(ctx, t.own.Raw, keystore.SealLimits{Idle: idle, Lock: groupLock})
	})
	if err != nil {
		t.rollback()
		return nil, fmt.Errorf("begin: seal: %w", err)
	}
	g := &sqlGroup{sqlTx: t}
	g.statements, g.end = repeats.Statements(t.own.Raw, n)
	return g, nil
}

// handle returns the transaction as the handler of a claim sees it.
func (g *sqlGroup) handle(ctx context.Context, id ID, owner Owner) (*sqlTx, error) {
	t := &sqlTx{store: g.store, own: g.own, id: id, owner: owner, grouped: true}
	t.Handle = txhandle.New(g.own, g.statements, g.store.where.Dialect, ErrTxEnded, t.lost)
	t.Share(ErrTxShared)
	if g.store.keys.Traits().SealsClaims {
		if err := t.step(ctx, t.sealClaim); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// untouched reports whether the handler has had no part in the transaction. Where claims
// are sealed, the seal is a part.
func (t *sqlTx) untouched() bool {
	return !t.store.keys.Traits().SealsClaims && !t.Used()
}

// completeAll is complete for several claims. stale are the positions of those that belong
// to other owners; if there are any, the transaction must not be committed.
func (g *sqlGroup) completeAll(ctx context.Context, all []keystore.Completed) (stale []int, err error) {
	stale, err = boundtx.Do(ctx, g.own, stepLimit, func(ctx context.Context) ([]int, error) {
		return g.store.keys.FinishAll(ctx, g.own.Raw, all)
	})
	if err != nil {
		return nil, fmt.Errorf("complete keys: %w", err)
	}
	return stale, nil
}

// endStatements closes prepared statements before the transaction ends.
func (g *sqlGroup) endStatements(ctx context.Context, log *slog.Logger) {
	spoiled := g.step(context.WithoutCancel(ctx), func(context.Context) error { return g.end() })
	if spoiled != nil && !g.own.Unanswered(spoiled) {
		log.LogAttrs(ctx, slog.LevelWarn, "a pooled connection already has a prepared statement of this name; statements are no longer prepared",
			slog.Any("error", spoiled))
	}
}

// close rolls back; a no-op after the commit. It waits for a running statement.
func (g *sqlGroup) close(ctx context.Context, log *slog.Logger) {
	g.endStatements(ctx, log)
	g.rollback()
}
