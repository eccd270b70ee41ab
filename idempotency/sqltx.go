package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/lent"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// sqlTx is the transaction in which a handler runs.
type sqlTx struct {
	*lent.Handle
	store *SQLStore
	own   *boundtx.Tx
	tx    *sql.Tx // own's
	id    ID
	owner Owner

	grouped bool        // it shares its transaction
	failed  atomic.Bool // a statement of the handler failed
	beaten  atomic.Bool // one lost against another transaction
	rows    handlerRows
}

// begin begins a transaction for the owner of a claim. The database refuses to commit it
// unless complete has sealed it. PostgreSQL ends it when nothing is sent in it for idle.
func (s *SQLStore) begin(ctx context.Context, id ID, owner Owner, isolation sql.IsolationLevel, idle time.Duration) (*sqlTx, error) {
	t, err := s.beginPlain(ctx, isolation)
	if err != nil {
		return nil, err
	}
	t.id, t.owner = id, owner
	t.Handle = lent.New(t.own, t.tx, s.cfg.Dialect, ErrTxEnded, t.lost)
	if err := t.open(ctx, idle, asConfigured); err != nil {
		t.rollback()
		return nil, err
	}
	return t, nil
}

// beginPlain begins a transaction that belongs to no claim and has no seal.
func (s *SQLStore) beginPlain(ctx context.Context, isolation sql.IsolationLevel) (*sqlTx, error) {
	var options *sql.TxOptions
	if s.cfg.Dialect == oncemill.PostgreSQL {
		options = &sql.TxOptions{Isolation: isolation}
	}
	own, err := boundtx.Begin(ctx, s.db, s.cfg.Dialect, s.calls, options)
	if err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	t := &sqlTx{store: s, own: own, tx: own.Raw}
	t.Handle = lent.New(own, own.Raw, s.cfg.Dialect, ErrTxEnded, func(context.Context, error) error { return nil })
	return t, nil
}

// asConfigured leaves PostgreSQL's lock_timeout unchanged.
const asConfigured = ""

// open opens the seal. locks is how long a statement waits for a lock.
func (t *sqlTx) open(ctx context.Context, idle time.Duration, locks string) error {
	return t.step(ctx, func(ctx context.Context) error { return t.openIn(ctx, idle, locks) })
}

// step runs the store's own statements in the transaction.
func (t *sqlTx) step(ctx context.Context, do func(ctx context.Context) error) error {
	_, err := boundtx.Do(ctx, t.own, stepLimit, func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx) })
	return err
}

func (t *sqlTx) openIn(ctx context.Context, idle time.Duration, locks string) error {
	if t.store.cfg.Dialect == oncemill.PostgreSQL {
		var nothing string
		patience := strconv.FormatInt(idle.Milliseconds(), 10) + "ms"
		if err := t.queryRow(ctx, t.store.q.open, patience, locks).Scan(&nothing); err != nil {
			return fmt.Errorf("begin: open the seal: %w", err)
		}
		return nil
	}
	var sealable bool
	err := t.queryRow(ctx, t.store.q.open, t.id[:], t.owner.Token[:], t.owner.Fence).Scan(&sealable)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return ErrStaleOwner
	case err != nil:
		return fmt.Errorf("begin: open the seal: %w", err)
	case !sealable:
		return ErrUnsealed
	}
	return nil
}

// complete is the last statement: it marks the claim and permits the database to commit.
// ErrStaleOwner means that the claim belongs to another owner, or that the handler has
// ended the transaction.
func (t *sqlTx) complete(ctx context.Context, c Completion) error {
	return t.step(ctx, func(ctx context.Context) error { return t.completeIn(ctx, c) })
}

func (t *sqlTx) completeIn(ctx context.Context, c Completion) error {
	s := t.store
	if s.cfg.Dialect == oncemill.SQLite {
		return s.update(ctx, t.tx, s.q.completeTx, t.id, t.owner, c)
	}
	var sealed bool
	if err := t.queryRow(ctx, s.q.completeTx, completionArgs(t.id, t.owner, c)...).Scan(&sealed); err != nil {
		// With 40001 for a claim that was taken over, at the higher isolation levels.
		return fmt.Errorf("complete key: %w", err)
	}
	if !sealed {
		return ErrStaleOwner
	}
	return nil
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

// sealConstraint is the foreign key that PostgreSQL finds violated at the commit of a
// transaction that complete has not sealed. Its error message contains the name, in the
// quotation marks of its language.
const sealConstraint = "idempotency_ended_by_handler"

// txAborted is the SQLSTATE of a statement in a transaction in which a statement has
// failed.
const txAborted = "25P02"

// aborted reports whether a statement has failed, including one that the handle does not
// see: one that the handler prepared, or whose rows it read. SQLite aborts only the
// statement.
func (t *sqlTx) aborted(ctx context.Context) bool {
	if t.store.cfg.Dialect == oncemill.SQLite || !t.Used() {
		return false
	}
	err := t.step(ctx, func(ctx context.Context) error {
		_, err := t.tx.ExecContext(ctx, `select 1`)
		return err
	})
	return err != nil
}

// lockTimedOut is the SQLSTATE of a statement that has waited for a lock for the whole
// lock_timeout.
const lockTimedOut = "55P03"

// lost finds out whether a failed statement also ended the transaction. PostgreSQL never
// ends one on its own and refuses everything after an error; only the seal reports an
// attempt to commit. SQLite rolls back when a writing statement is interrupted or the disk
// is full; later statements would then commit one by one. An unsealed row is never
// committed, so a visible one is ours.
func (t *sqlTx) lost(ctx context.Context, err error) error {
	t.failed.Store(true)
	if sqlerr.Retryable(err) || t.grouped && sqlerr.State(err) == lockTimedOut {
		t.beaten.Store(true)
	}
	if t.store.cfg.Dialect == oncemill.PostgreSQL {
		if sqlerr.State(err) == "23503" && strings.Contains(err.Error(), sealConstraint) {
			return fmt.Errorf("%w (or it has set all constraints immediate: name those that are meant): %w", oncemill.ErrTxOwned, err)
		}
		return nil
	}
	var open int
	check := t.tx.QueryRowContext(context.WithoutCancel(ctx), t.store.q.lost, t.id[:]).Scan(&open)
	if check != nil || open != 1 {
		return fmt.Errorf("%w: %w", ErrTxEnded, err)
	}
	return nil
}

// queryRow runs a query for one row in the transaction.
func (t *sqlTx) queryRow(ctx context.Context, text string, args ...any) *sql.Row {
	if stmt := t.store.stmt(text); stmt != nil {
		return t.tx.StmtContext(ctx, stmt).QueryRowContext(ctx, args...) //nolint:sqlclosecheck // the transaction closes it
	}
	return t.tx.QueryRowContext(ctx, text, args...)
}

// query runs a query in the transaction.
func (t *sqlTx) query(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if stmt := t.store.stmt(text); stmt != nil {
		return t.tx.StmtContext(ctx, stmt).QueryContext(ctx, args...) //nolint:sqlclosecheck // the transaction closes it
	}
	return t.tx.QueryContext(ctx, text, args...)
}
