package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Tx is the transaction of an idempotent request or command, as its handler sees
// it: statements and savepoints, but no end. It fits where sqlc wants a DBTX and
// where outbox.Publisher wants a transaction.
//
// Commit and Rollback do nothing and return oncemill.ErrTxOwned, so a deferred
// Rollback is harmless; answer below 400 to commit, else it is rolled back. SQL
// text that ends the transaction is not sent: it returns oncemill.ErrTxOwned and
// fails the request. After the handler has returned every method fails with
// [ErrTxEnded].
//
// On PostgreSQL, set constraints all immediate fails; name the constraints.
type Tx interface {
	oncemill.Tx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// TxFromContext returns the transaction of the request or command that ctx belongs
// to. It is what oncemill.TxFromContext returns there, so a context-bound outbox
// publisher writes in the same transaction.
func TxFromContext(ctx context.Context) (Tx, bool) {
	tx, _ := oncemill.TxFromContext(ctx)
	t, ok := tx.(*sqlTx)
	return t, ok
}

// txOutcome is how a transaction of a handler ended.
type txOutcome int

const (
	committed   txOutcome = iota
	rolledBack            // nothing of it is left, and the claim is still ours
	lostClaim             // nothing of it is left, and the claim is another's
	uncertain             // it committed or not
	runAgain              // it lost against another transaction
	unreachable           // the store could not be reached; the claim may be ours
)

// finish completes the claim in the transaction and commits.
func (e *Engine) finish(ctx context.Context, in *intent, t *sqlTx, owner Owner, c Completion) (txOutcome, error) {
	if reason := t.Close(ErrTxEnded); reason != nil {
		// The handler has overlooked what its statement returned.
		return rolledBack, reason
	}
	began := time.Now()
	err := t.complete(ctx, c)
	e.telemetry.latency(ctx, "complete_tx", began, err)
	switch {
	case errors.Is(err, ErrStaleOwner):
		if outcome, err := e.beaten(ctx, in, t, owner, err); outcome != runAgain {
			return outcome, err
		}
		return rolledBack, ErrTxEnded // the claim is ours: the handler has ended the transaction
	case err != nil:
		return e.beaten(ctx, in, t, owner, err)
	}
	if err := ctx.Err(); err != nil {
		return rolledBack, fmt.Errorf("commit: %w", err)
	}
	e.at("before commit")
	began = time.Now()
	err = t.commit()
	e.telemetry.latency(ctx, "commit", began, err)
	e.at("after commit")
	switch {
	case err == nil:
		return committed, nil
	case errors.Is(err, boundtx.ErrUnknown):
		return e.lookUp(ctx, in, owner, c, err)
	}
	return e.beaten(ctx, in, t, owner, err)
}

// beaten finds out why a transaction did not commit: against a business
// transaction, or for a reason of its own, in which case the claim is still ours,
// or against whoever took the claim over.
func (e *Engine) beaten(ctx context.Context, in *intent, t *sqlTx, owner Owner, cause error) (txOutcome, error) {
	t.rollback()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	record, found, err := e.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return unreachable, errors.Join(cause, err)
	case !found || record.State != Started || record.Owner != owner:
		return lostClaim, cause
	case sqlerr.Retryable(cause) || t.beaten.Load() || errors.Is(cause, ErrStaleOwner):
		return runAgain, cause
	case sqlerr.Connection(cause):
		return unreachable, cause
	}
	return rolledBack, cause
}

// lookUp asks, on another connection, what became of a commit whose answer was
// lost. A row that is completed by us says that it committed. One that is still
// started says nothing for certain: the commit may be on its way in the server, so
// the claim is left alone; whoever takes it over meets the row's lock first.
func (e *Engine) lookUp(ctx context.Context, in *intent, owner Owner, c Completion, cause error) (txOutcome, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause *= 2 {
		record, found, err := e.store.Find(ctx, in.claim.ID)
		switch {
		case err == nil && found && record.Owner == owner && record.State == c.State:
			return committed, nil
		case err == nil && (!found || record.Owner != owner):
			return lostClaim, cause
		}
		const most = 500 * time.Millisecond
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil || pause > most {
			e.cfg.Logger.LogAttrs(ctx, slog.LevelError, "outcome of a commit is unknown", in.keyHash(),
				slog.String("endpoint", in.claim.Endpoint), slog.Any("error", errors.Join(cause, err)))
			return uncertain, cause
		}
	}
}

// yield lets the winner of a conflict finish; the spread keeps losers from meeting
// again. It reports false when there is no time for another try.
func (e *Engine) yield(deadline time.Time, try int) bool {
	if try >= e.cfg.Retries {
		return false
	}
	pause := time.Duration(rand.Int64N(int64(time.Millisecond) << min(try, 7))) //nolint:gosec // no secret
	if time.Until(deadline) <= pause {
		return false
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	<-timer.C
	return true
}
