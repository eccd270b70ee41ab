package idempotency

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/keystore"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

type groupMember = group.Member[*execution, groupEnd]

// groupEnd is the ending of a request in a group. The request's own goroutine settles and
// answers it.
type groupEnd struct {
	ending
	refused bool // by its handler, which had no effects

	// tx is the transaction in which the attempt is still running. It is rolled back.
	tx *sqlGroup
}

// groupRun is one transaction of a group.
type groupRun struct {
	*core
	tx     *sqlGroup      // nil: it belongs to the one whose handler is slow
	left   []*groupMember // not settled
	done   []*groupMember // of these, those whose handlers have run
	ends   []groupEnd     // of done
	stored int            // bytes of their responses
}

// close ends the transaction, and discards the recordings that are not used.
func (r *groupRun) close(ctx context.Context) {
	if r.tx != nil {
		r.tx.close(ctx, r.cfg.Logger) // a no-op after the commit
	}
	for _, end := range r.ends {
		end.attempt.discard()
	}
}

func (r *groupRun) settled(members ...*groupMember) {
	r.left = slices.DeleteFunc(r.left, func(m *groupMember) bool { return slices.Contains(members, m) })
}

// separate removes m from the group, so that it continues alone.
func (r *groupRun) separate(m *groupMember) group.Result {
	r.settled(m)
	m.Alone()
	return group.Failed
}

// handle runs the handler of m. ended means that the transaction must not continue.
func (r *groupRun) handle(m *groupMember) (result group.Result, ended bool) {
	x := m.Work
	if !time.Now().Before(x.deadline) {
		r.separate(m) // its time is up
		return group.Clean, false
	}
	t, err := r.tx.handle(m.Context(), x.claim.ID, x.owner)
	if err != nil {
		return r.separate(m), true
	}
	a := x.start(m.Context(), t)
	returned := a.waitFor(groupWait, x.deadline)
	x.at("after effect")
	reason := t.Close(ErrTxEnded) // what the handler has overlooked
	if !returned {
		r.disband(m, a)
		return group.Contended, true
	}
	report := x.report(a)
	switch {
	case !a.late && report == reportRefused && t.untouched():
		r.settled(m)
		m.Finish(groupEnd{ending: ending{attempt: a}, refused: true})
		return group.Clean, false
	case t.contended.Load():
		a.discard()
		return group.Contended, true
	case a.late, report != reportSucceeded, reason != nil:
		a.discard()
		return r.separate(m), true
	}
	end := groupEnd{ending: ending{outcome: outcomeStored, attempt: a}}
	err = nopanic.Call(func() (err error) { // what panics for m does so alone, and not here
		end.completion, err = x.completion(a)
		return err
	})
	if err != nil {
		a.discard()
		return r.separate(m), true
	}
	r.done, r.ends = append(r.done, m), append(r.ends, end)
	r.stored += len(end.completion.Response)
	return group.Clean, false
}

// disband lets all others continue alone, while m waits for its handler, whose context
// ends, and for the end of the transaction, which waits for its statement.
func (r *groupRun) disband(m *groupMember, slow *attempt) {
	slow.cancel()
	for _, other := range r.left {
		if other != m {
			other.Alone()
		}
	}
	r.left = nil
	m.Finish(groupEnd{ending: ending{attempt: slow}, tx: r.tx})
	r.tx = nil
}

// commit completes the claims of those whose handlers have run, and commits.
func (r *groupRun) commit(ctx context.Context) group.Result {
	r.tx.endStatements(ctx, r.cfg.Logger)
	all := make([]keystore.Completed, len(r.done))
	for i, m := range r.done {
		all[i] = keystore.Completed{ID: keystore.ID(m.Work.claim.ID), Owner: keystore.Owner(m.Work.owner), Completion: r.ends[i].completion.asKey()}
	}
	began := time.Now()
	stale, err := r.tx.completeAll(ctx, all)
	r.telemetry.latency(ctx, "complete_tx", began, err)
	if err == nil && len(stale) > 0 {
		for _, i := range stale {
			r.separate(r.done[i])
		}
		return group.Failed
	}
	// The same as in finish.
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return r.failed(err)
	}
	r.at("before commit")
	began = time.Now()
	err = r.tx.commit()
	r.telemetry.latency(ctx, "commit", began, err)
	r.at("after commit")
	outcome := outcomeStored
	if errors.Is(err, boundtx.ErrUnknown) {
		outcome = outcomeUncertain
	} else if err != nil {
		return r.failed(err)
	}
	for i, m := range r.done {
		r.ends[i].outcome, r.ends[i].err = outcome, err
		m.Finish(r.ends[i])
	}
	r.settled(r.done...)
	r.ends = nil
	return group.Clean
}

// failed ends a group that could not be committed.
func (r *groupRun) failed(err error) group.Result {
	if sqlerr.Retryable(err) || sqlerr.LockTimedOut(err) {
		return group.Contended
	}
	for _, m := range r.left { // it is not known whose fault it was: a deferred constraint, perhaps
		m.Alone()
	}
	r.left = nil
	return group.Failed
}
