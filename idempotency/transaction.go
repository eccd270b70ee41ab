package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// tryInTx runs the function once in a transaction of its own.
func (x *execution) tryInTx(ctx context.Context, store *SQLStore) ending {
	began := time.Now()
	t, err := store.begin(ctx, x.claim.ID, x.owner, x.cfg.Transactions.Isolation, x.cfg.Timeout)
	x.telemetry.latency(ctx, "begin", began, err)
	switch {
	case errors.Is(err, ErrStaleOwner):
		return ending{outcome: outcomeLostClaim, err: err}
	case err != nil:
		return ending{outcome: outcomeUnreachable, err: err}
	}
	defer t.rollback() // a no-op after the commit
	a := x.start(ctx, t)
	a.wait(x.deadline, x.expire)
	x.at("after effect")
	report := x.report(a)
	if report == reportSucceeded && !a.late {
		return x.finish(ctx, t, a)
	}
	lost, aborted := t.undo(ctx, a, report)
	switch {
	case a.late:
		return ending{outcome: outcomeTimedOut, attempt: a, err: context.DeadlineExceeded}
	case lost:
		return ending{outcome: outcomeContended, attempt: a, err: a.err}
	case aborted:
		return ending{outcome: outcomeReleased, attempt: a}
	}
	return x.withoutEffect(ctx, a)
}

// undo rolls back the transaction of an attempt that did not succeed. lost is true if a
// conflict in the database is the cause, or may be: then the answer may be based on it.
// aborted is true if the server has refused the transaction before its answer.
func (t *sqlTx) undo(ctx context.Context, a *attempt, r report) (lost, aborted bool) {
	closed := t.Close(ErrTxEnded)
	lost = t.contended.Load() || sqlerr.Retryable(a.err)
	aborted = r == reportRefused && closed == nil && !lost && t.aborted(ctx)
	t.rollback()
	return lost || aborted && !t.failed.Load(), aborted
}

// mayWin reports whether a transaction that failed with cause may succeed when it runs again.
func (t *sqlTx) mayWin(cause error) bool {
	return sqlerr.Retryable(cause) || t.contended.Load() ||
		sqlerr.TxAborted(cause) && !t.failed.Load() // by a statement that we have not seen, so maybe by a conflict
}

// finish completes the claim in the transaction and commits.
func (x *execution) finish(ctx context.Context, t *sqlTx, a *attempt) ending {
	if reason := t.Close(ErrTxEnded); reason != nil {
		// The handler has ignored the error that its statement returned.
		return ending{outcome: outcomeUncommitted, attempt: a, err: reason}
	}
	c, err := x.completion(a)
	if err != nil {
		return ending{outcome: outcomeUncommitted, attempt: a, err: err}
	}
	end := ending{attempt: a, completion: c}
	end.outcome, end.err = x.completeAndCommit(ctx, t, c)
	return end
}

func (x *execution) completeAndCommit(ctx context.Context, t *sqlTx, c Completion) (outcome, error) {
	began := time.Now()
	err := t.complete(ctx, c)
	x.telemetry.latency(ctx, "complete_tx", began, err)
	switch {
	case errors.Is(err, ErrStaleOwner):
		if outcome, err := x.whyNotCommitted(ctx, t, err); outcome != outcomeContended {
			return outcome, err
		}
		return outcomeUncommitted, ErrTxEnded // the claim is ours: the handler has ended the transaction
	case err != nil:
		return x.whyNotCommitted(ctx, t, err)
	}
	if err := ctx.Err(); err != nil {
		return outcomeTimedOut, fmt.Errorf("commit: %w", err)
	}
	x.at("before commit")
	began = time.Now()
	err = t.commit()
	x.telemetry.latency(ctx, "commit", began, err)
	x.at("after commit")
	switch {
	case err == nil:
		return outcomeStored, nil
	case errors.Is(err, boundtx.ErrUnknown):
		return x.lookUp(ctx, c, err)
	}
	return x.whyNotCommitted(ctx, t, err)
}

// whyNotCommitted finds out why a transaction did not commit. It lost against another business
// transaction, or failed for another reason (the claim is still ours in both cases),
// or lost against an owner that took over the claim.
func (x *execution) whyNotCommitted(ctx context.Context, t *sqlTx, cause error) (outcome, error) {
	t.rollback()
	late := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	record, found, err := x.store.Find(ctx, x.claim.ID)
	switch {
	case err != nil:
		return outcomeUnreachable, errors.Join(cause, err)
	case !found || record.State != StateStarted || record.Owner != x.owner:
		return outcomeLostClaim, cause
	case t.mayWin(cause), errors.Is(cause, ErrStaleOwner):
		return outcomeContended, cause
	case sqlerr.Connection(cause):
		return outcomeUnreachable, cause
	case late:
		return outcomeTimedOut, cause
	}
	return outcomeUncommitted, cause
}

// lookUp finds out, on another connection, what became of a commit whose answer was lost.
// A row that we have completed proves that it committed. A row that is still started
// proves nothing: the commit may be on its way in the server, so the claim is left alone.
// An owner that takes it over waits for the row's lock first.
func (x *execution) lookUp(ctx context.Context, c Completion, cause error) (outcome, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause *= 2 {
		record, found, err := x.store.Find(ctx, x.claim.ID)
		switch {
		case err == nil && found && record.Owner == x.owner && record.State == c.State:
			return outcomeStored, nil
		case err == nil && (!found || record.Owner != x.owner):
			return outcomeLostClaim, cause
		}
		const most = 500 * time.Millisecond
		if !sleep.For(ctx, pause) || pause > most {
			x.log(ctx, slog.LevelError, "outcome of a commit is unknown", slog.Any("error", errors.Join(cause, err)))
			return outcomeUncertain, cause
		}
	}
}

// backOff lets the winner of a conflict finish; the spread keeps losers from colliding
// again. It returns false when there is no time for another try.
func (in *intent) backOff(try int) bool {
	if try >= in.cfg.Transactions.Retries {
		return false
	}
	pause := in.draw(time.Millisecond << min(try, 7))
	if time.Until(in.deadline) <= pause {
		return false
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	<-timer.C
	return true
}

// runAlone runs the function in a transaction of its own, and again if that lost against
// another. It returns how often it lost.
func (x *execution) runAlone(ctx context.Context) (end ending, lost int) {
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // newIntent's caller has checked
	}
	for ; ; lost++ {
		end = x.tryInTx(ctx, store)
		if end.outcome != outcomeContended || !x.backOff(lost) {
			return end, lost
		}
		end.attempt.discard()
	}
}

// withoutEffect ends an attempt whose transaction was rolled back, or that did not use it.
func (x *execution) withoutEffect(ctx context.Context, a *attempt) ending {
	if x.report(a) == reportRefused {
		// If it cannot be stored, no answer is better than one that may differ later.
		return x.storeAnswer(ctx, a, outcomeUnreachable)
	}
	return ending{outcome: outcomeReleased, attempt: a, err: a.err}
}
