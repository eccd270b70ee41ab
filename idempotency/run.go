package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/oncemill/oncemill/internal/contain"
)

// work is what runs under a claim: a request or a command.
type work interface {
	// start begins an attempt. tx is nil if effects are elsewhere.
	start(ctx context.Context, tx *sqlTx) *attempt

	// expire is called when time is up before an attempt has returned.
	expire(a *attempt)

	// said returns what an attempt reported about its effects, once it has returned.
	said(a *attempt) said

	// completion encodes the stored form of an attempt.
	completion(a *attempt) (Completion, error)

	// recovered makes an attempt of the result of Config.Failures.Recover.
	recovered(ctx context.Context, found Recovery) (*attempt, error)
}

// said is what an attempt reports about its effects.
type said int

const (
	failed    said = iota // nothing: it panicked, or answered with 5xx, or an error
	succeeded             // they are there, or shall be
	refused               // there is none, and the same request would be refused again
	declined              // there is none; the same request may succeed later
)

// outcome is the outcome of a run. It decides what happens to the claim; see settled.
type outcome int

const (
	stored      outcome = iota // the answer is stored, with the effects of the transaction
	released                   // there is no effect, as the handler says
	timedOut                   // there is no effect: rolled back, since time was up
	contended                  // there is no effect: it lost against other transactions
	uncommitted                // there is no effect: the database refused the commit
	unreachable                // there is no effect: the store could not be reached
	unknown                    // there may be effects elsewhere
	unstored                   // there may be effects elsewhere, and their answer could not be stored
	lostClaim                  // the claim is another's, and what was in the transaction is rolled back
	uncertain                  // the transaction has committed or not
)

// ending is the outcome of a run, with its last attempt, if there was one.
type ending struct {
	outcome    outcome
	attempt    *attempt
	completion Completion // of what is stored
	err        error      // why nothing is
}

// execution is a claim and what runs under it. It is the only place that runs handlers, of
// requests and commands, in transactions and without.
//
// The difference is where the effects of an attempt are. In the transaction they are
// rolled back with it, so a failure has had no effect. Elsewhere they stay: once the
// function has been called, the outcome is unknown unless the function reports it.
type execution struct {
	*intent
	work
}

// run runs the function and settles the claim. The caller reports the outcome.
func (x *execution) run(ctx context.Context) ending {
	x.at("after claim")
	ctx = context.WithoutCancel(ctx)
	x.count(ctx, x.telemetry.started, 0)
	x.log(ctx, slog.LevelDebug, "new request processing")
	if !x.transactional {
		return x.settled(ctx, x.runElsewhere(ctx))
	}
	inTime, cancel := context.WithDeadline(ctx, x.end)
	defer cancel()
	if x.groups != nil && x.shares {
		return x.settled(ctx, x.groups.run(inTime, x))
	}
	end, _ := x.runAlone(inTime)
	return x.settled(ctx, end)
}

// settled updates the claim according to the outcome of its run.
func (x *execution) settled(ctx context.Context, end ending) ending {
	switch end.outcome {
	case stored:
		if x.transactional && x.said(end.attempt) == succeeded {
			x.cfg.OnCommit()
		}
		x.cache(ctx, end.completion)
	case released, timedOut, contended:
		x.release(ctx)
	case uncommitted:
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.log(ctx, slog.LevelError, "request not committed", slog.Any("error", end.err))
		x.release(ctx)
	case unreachable:
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.release(ctx)
	case unknown:
		x.log(ctx, slog.LevelWarn, "outcome unknown") // its error, which may quote the payload, is the caller's
		x.giveUp(ctx)
	case unstored: // the end of the lease gives it up
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.log(ctx, slog.LevelError, "response not stored", slog.Any("error", end.err))
	case lostClaim:
		x.count(ctx, x.telemetry.stale, 0)
		x.log(ctx, slog.LevelWarn, "key lost to another owner", slog.Any("error", end.err))
	case uncertain: // the claim has committed or not; whoever comes next finds out
		x.count(ctx, x.telemetry.completeFailures, 0)
	}
	return end
}

// runElsewhere runs a function whose effects are not in our transaction. The claim is kept
// for as long as it runs, and its success is stored however late. No other late answer is
// trusted: the end of the context may have caused it.
func (x *execution) runElsewhere(ctx context.Context) ending {
	stop := x.keepLease(ctx)
	a := x.start(ctx, nil)
	a.wait(x.deadline, x.expire)
	stop()
	x.at("after effect")
	said := x.said(a)
	if a.late && said != succeeded {
		said = failed
	}
	switch {
	case said == succeeded, said == refused:
		return x.keep(ctx, a, unstored)
	case said == declined, a.state.hadNoEffect(), x.cfg.Failures.Failed == FailedRelease:
		return ending{outcome: released, attempt: a, err: a.err}
	}
	return ending{outcome: unknown, attempt: a, err: a.err}
}

// keep stores the answer of an attempt. otherwise is the outcome if that fails.
func (x *execution) keep(ctx context.Context, a *attempt, otherwise outcome) ending {
	c, err := x.completion(a)
	if err == nil {
		x.at("before commit")
		err = x.complete(ctx, c)
		x.at("after commit")
	}
	switch {
	case errors.Is(err, ErrStaleOwner):
		return ending{outcome: lostClaim, attempt: a, err: err}
	case err != nil:
		return ending{outcome: otherwise, attempt: a, err: err}
	}
	return ending{outcome: stored, attempt: a, completion: c}
}

// runAlone runs the function in a transaction of its own, and again if that lost against
// another. It returns how often it lost.
func (x *execution) runAlone(ctx context.Context) (end ending, lost int) {
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // whoever made the intent has looked
	}
	for ; ; lost++ {
		end = x.tryInTx(ctx, store)
		if end.outcome != contended || !x.yield(lost) {
			return end, lost
		}
		end.attempt.discard()
	}
}

// withoutEffect ends an attempt whose transaction was rolled back, or that had no part in
// it.
func (x *execution) withoutEffect(ctx context.Context, a *attempt) ending {
	if x.said(a) == refused {
		// If it cannot be stored, no answer is better than one that may differ later.
		return x.keep(ctx, a, unreachable)
	}
	return ending{outcome: released, attempt: a, err: a.err}
}

// recover asks Config.Failures.Recover about the run of a dead owner.
func (x *execution) recover(ctx context.Context, record Record) ending {
	asking, cancel := context.WithDeadline(ctx, x.deadline)
	defer cancel()
	var found Recovery
	err := contain.Call(func() (err error) {
		found, err = x.cfg.Failures.Recover(asking, x.reveal(record))
		return err
	})
	if err == nil {
		err = x.check(found)
	}
	switch {
	case err == nil && found.RunAgain:
		return x.run(ctx)
	case err == nil && found.Status != 0:
		a, failure := x.recovered(ctx, found)
		if failure == nil {
			return x.settled(ctx, x.keep(ctx, a, unstored))
		}
		a.discard()
		err = failure
	case err != nil:
		x.log(ctx, slog.LevelWarn, "outcome not found out", slog.Any("error", err))
		err = fmt.Errorf("recover: %w", err)
	}
	return x.settled(ctx, ending{outcome: unknown, err: err}) // the next one may ask again
}
