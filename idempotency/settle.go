package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// settleTime is how long the engine tries to report the end of a run to the store, if
// another request would find out eventually.
const settleTime = 5 * time.Second

// settleLimit returns how long to try. Without transactions the outcome is known only
// here, so it is longer.
func (in *intent) settleLimit() time.Duration {
	if in.transactional {
		return settleTime
	}
	return max(settleTime, in.cfg.Failures.Lease)
}

// settle calls do until it succeeds, is too late, or the time is up. ctx may have ended.
func (in *intent) settle(ctx context.Context, operation string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.settleLimit())
	defer cancel()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		began := time.Now()
		err := do(ctx)
		in.telemetry.latency(ctx, operation, began, err)
		if err == nil || errors.Is(err, ErrStaleOwner) {
			return err
		}
		if !sleep.For(ctx, pause) {
			return err
		}
	}
}

// release lets the key run again. If that fails, the end of the lease does so (or, without
// transactions, Config.Failures.Crashed then decides).
func (in *intent) release(ctx context.Context) {
	once := func(ctx context.Context) error { return in.store.Release(ctx, in.claim.ID, in.owner) }
	var err error
	if in.transactional {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
		defer cancel()
		err = once(limited)
	} else {
		err = in.settle(ctx, "release", once)
	}
	if err != nil {
		in.log(ctx, slog.LevelWarn, "key not released", slog.Any("error", err))
	}
}

// giveUp ends the lease of a run whose outcome is unknown, as if its process had died.
// From then on Config.Failures.Crashed decides. If giveUp fails, the lease ends by itself.
func (in *intent) giveUp(ctx context.Context) {
	err := in.settle(ctx, "give_up", func(ctx context.Context) error { return in.store.Extend(ctx, in.claim.ID, in.owner, 0) })
	if err != nil {
		in.log(ctx, slog.LevelWarn, "lease not ended", slog.Any("error", err))
	}
}

// complete stores an answer outside a transaction.
func (in *intent) complete(ctx context.Context, c Completion) error {
	return in.settle(ctx, "complete", func(ctx context.Context) error {
		err := in.store.Complete(ctx, in.claim.ID, in.owner, c)
		if errors.Is(err, ErrStaleOwner) {
			// Or the previous try has arrived and only its answer was lost.
			if record, found, findErr := in.store.Find(ctx, in.claim.ID); findErr == nil && found && record.Owner == in.owner && record.State == c.State {
				return nil
			}
		}
		return err
	})
}

// abandon gives up a claim that the store may have granted although its answer was lost. It
// reports whether nothing of it is left, or to come.
func (in *intent) abandon(ctx context.Context, cause error, do func(context.Context) error) (gone bool) {
	if sqlerr.Retryable(cause) {
		return true // the database has reported that nothing happened
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := do(ctx); err != nil {
		in.log(ctx, slog.LevelDebug, "claim not abandoned", slog.Any("error", err))
		return false
	}
	return true
}

// renew renews the lease, unless another owner has taken the key over.
func (in *intent) renew(ctx context.Context) error {
	return nopanic.Call(func() error { return in.store.Extend(ctx, in.claim.ID, in.owner, in.cfg.Failures.Lease) })
}

// keepLease renews the lease until stop is called; stop waits for a renewal that is
// running. The lease began when the claim was sent, whose answer may have come late.
func (in *intent) keepLease(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	every := in.cfg.Failures.Lease / 3
	done := make(chan struct{})
	go func() {
		defer close(done)
		for last := in.began; sleep.For(ctx, every-time.Since(last)); {
			last = time.Now()
			renewing, cancel := context.WithTimeout(ctx, every)
			err := in.renew(renewing)
			cancel()
			if err != nil && ctx.Err() == nil {
				in.log(ctx, slog.LevelWarn, "lease not extended", slog.Any("error", err))
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// cache puts a stored response into the cache, once it has committed.
func (in *intent) cache(ctx context.Context, c Completion) {
	if in.cfg.Responses.Cache == nil || c.State != StateCompleted {
		return
	}
	in.cfg.Responses.Cache.Put(ctx, Record{
		ID: in.claim.ID, Caller: in.claim.Caller, Fingerprint: in.claim.Fingerprint, State: c.State, Owner: in.owner,
		Endpoint: in.claim.Endpoint, Status: c.Status, Response: c.Response, Location: c.Location, ResourceID: c.ResourceID,
		// Measured from before the commit, so that it does not outlive the record.
		ExpiresIn: c.Retention - time.Since(in.began),
	})
}

// settled updates the claim according to the outcome of its run.
func (x *execution) settled(ctx context.Context, end ending) ending {
	x.state = outcomeStates[end.outcome]
	x.charge(end)
	switch end.outcome {
	case outcomeStored:
		if x.transactional && x.report(end.attempt) == reportSucceeded {
			x.cfg.OnCommit()
		}
		x.cache(ctx, end.completion)
	case outcomeReleased, outcomeTimedOut, outcomeContended:
		x.release(ctx)
	case outcomeUncommitted:
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.log(ctx, slog.LevelError, "request not committed", slog.Any("error", end.err))
		x.release(ctx)
	case outcomeUnreachable:
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.release(ctx)
	case outcomeUnknown:
		x.log(ctx, slog.LevelWarn, "outcome unknown") // its error, which may quote the payload, is the caller's
		x.giveUp(ctx)
	case outcomeUnstored: // the end of the lease gives it up
		x.count(ctx, x.telemetry.completeFailures, 0)
		x.log(ctx, slog.LevelError, "response not stored", slog.Any("error", end.err))
	case outcomeLostClaim:
		x.count(ctx, x.telemetry.stale, 0)
		x.log(ctx, slog.LevelWarn, "key lost to another owner", slog.Any("error", end.err))
	case outcomeUncertain: // the claim has committed or not; the next request finds out
		x.count(ctx, x.telemetry.completeFailures, 0)
	}
	return end
}

// storeAnswer stores the answer of an attempt. otherwise is the outcome if that fails.
func (x *execution) storeAnswer(ctx context.Context, a *attempt, otherwise outcome) ending {
	c, err := x.completion(a)
	if err == nil {
		x.at("before commit")
		err = x.complete(ctx, c)
		x.at("after commit")
	}
	switch {
	case errors.Is(err, ErrStaleOwner):
		return ending{outcome: outcomeLostClaim, attempt: a, err: err}
	case err != nil:
		return ending{outcome: otherwise, attempt: a, err: err}
	}
	return ending{outcome: outcomeStored, attempt: a, completion: c}
}
