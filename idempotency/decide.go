package idempotency

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/sqlerr"
)

// intent is a request or a command that wants to run.
type intent struct {
	claim         Claim
	transactional bool
	began         time.Time // before the claim was sent: trust in the lease counts from here
	tenant        string    // for metrics, if wanted
}

// verdict is what is to be done about an intent.
type verdict int

const (
	run          verdict = iota // the claim is ours
	recoverFirst                // the claim is ours, after its owner died: ask Config.Recover
	replay                      // the record holds the answer
	reused                      // the key came with another request
	inProgress                  // somebody else runs it
	outcomeLost                 // somebody else ran it and died
	notStored                   // it ran, and its response was not stored
	expired                     // it ran, and its response is gone
	tooMany                     // the caller has too many keys outstanding
	storeFailed                 // the store could not be asked
)

// lookAgain is how often a claim that changed hands meanwhile is looked at again.
const lookAgain = 5

// decide claims the key, or tells from its record what to do. The record is that
// of the claim for run and recoverFirst.
func (e *Engine) decide(ctx context.Context, in *intent) (Record, verdict, error) {
	if record, ok := e.cached(ctx, in); ok {
		return record, e.judge(in, record), nil
	}
	if e.cfg.MaxOutstanding != Unlimited {
		if v, record, err := e.limit(ctx, in); v != run {
			return record, v, err
		}
	}
	claim := e.store.Claim
	if e.groups != nil {
		claim = e.groups.claim
	}
	for range lookAgain {
		began := time.Now()
		record, granted, err := claim(ctx, in.claim)
		e.telemetry.latency(ctx, "claim", began, err)
		switch {
		case err != nil:
			// Nothing has run under a claim that may have been made.
			owner := Owner{Token: in.claim.Token, Fence: 1}
			e.abandon(ctx, in, err, func(ctx context.Context) error { return e.store.Release(ctx, in.claim.ID, owner) })
			return Record{}, storeFailed, err
		case granted:
			return record, run, nil
		}
		v := e.judge(in, record)
		if v != run {
			if v == replay && e.cfg.Cache != nil {
				e.cfg.Cache.Put(ctx, record)
			}
			return record, v, nil
		}
		began = time.Now()
		from := record.Owner
		record, granted, err = e.store.TakeOver(ctx, in.claim, from)
		e.telemetry.latency(ctx, "take_over", began, err)
		if err != nil {
			// Under the one that may have been taken over something may have.
			owner := Owner{Token: in.claim.Token, Fence: from.Fence + 1}
			e.abandon(ctx, in, err, func(ctx context.Context) error { return e.store.Extend(ctx, in.claim.ID, owner, 0) })
			return Record{}, storeFailed, err
		}
		if granted {
			in.count(ctx, e.telemetry.takeovers, 0)
			e.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "key taken over", in.keyHash(),
				slog.String("endpoint", in.claim.Endpoint), slog.Int64("fence", record.Owner.Fence))
			if !in.transactional && e.cfg.Crashed == Recover {
				return record, recoverFirst, nil
			}
			return record, run, nil
		}
	}
	// It changes hands, or its owner is just completing it.
	return Record{}, inProgress, nil
}

func (e *Engine) cached(ctx context.Context, in *intent) (Record, bool) {
	if e.cfg.Cache == nil {
		return Record{}, false
	}
	record, ok := e.cfg.Cache.Get(ctx, in.claim.ID)
	// What it says is believed as far as it can be checked.
	ok = ok && record.ID == in.claim.ID && record.State == Completed
	if ok {
		in.count(ctx, e.telemetry.cacheHits, 0)
	} else {
		in.count(ctx, e.telemetry.cacheMisses, 0)
	}
	return record, ok
}

// judge reads a record that stands in the way; run means that it may be taken
// over. Whether it is the same request comes first.
func (e *Engine) judge(in *intent, record Record) verdict {
	if record.State == Expired {
		return expired
	}
	if record.Fingerprint != in.claim.Fingerprint {
		return reused
	}
	switch record.State {
	case Completed:
		return replay
	case NotReplayable:
		return notStored
	}
	switch {
	case record.LeaseLeft > 0:
		return inProgress
	case !in.transactional && e.cfg.Crashed == Ambiguous:
		return outcomeLost
	}
	return run
}

// wait asks until the key is no longer in progress, or the time is up, and then
// decides again.
func (e *Engine) wait(ctx context.Context, in *intent) (Record, verdict, error) {
	const least, most = 5 * time.Millisecond, 200 * time.Millisecond
	deadline := time.Now().Add(e.cfg.WaitTimeout)
	for pause := least; ; pause = min(2*pause, most) {
		timer := time.NewTimer(min(pause, time.Until(deadline)))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Record{}, inProgress, nil
		}
		began := time.Now()
		record, found, err := e.store.Find(ctx, in.claim.ID)
		e.telemetry.latency(ctx, "find", began, err)
		if err != nil {
			return Record{}, storeFailed, err
		}
		if !found || e.judge(in, record) != inProgress {
			in.began = time.Now()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.cfg.Timeout)
			defer cancel()
			return e.decide(ctx, in)
		}
		if !time.Now().Before(deadline) {
			return record, inProgress, nil
		}
	}
}

// newClaim fills in what all claims have in common.
func (e *Engine) newClaim(transactional bool) Claim {
	c := Claim{Lease: e.cfg.Lease, Retention: e.cfg.Retention, Durable: !transactional}
	rand.Read(c.Token[:])
	return c
}

func (in *intent) keyHash() slog.Attr { return slog.String("key_hash", in.claim.ID.String()) }

// settleTime is how long the engine tries to tell the store about a run that has
// ended, where somebody else would find out in the end.
const settleTime = 5 * time.Second

// patience is how long it tries. Without transactions nobody else knows what
// happened, so it tries for longer.
func (e *Engine) patience(in *intent) time.Duration {
	if in.transactional {
		return settleTime
	}
	return max(settleTime, e.cfg.Lease)
}

// settle calls tell until it succeeds, has been too late, or the time is up. ctx
// may have ended.
func (e *Engine) settle(ctx context.Context, in *intent, operation string, tell func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.patience(in))
	defer cancel()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		began := time.Now()
		err := tell(ctx)
		e.telemetry.latency(ctx, operation, began, err)
		if err == nil || errors.Is(err, ErrStaleOwner) {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// release lets the key run again. If that fails, the end of the lease does it (or,
// without transactions, Config.Crashed decides then).
func (e *Engine) release(ctx context.Context, in *intent, owner Owner) {
	tell := func(ctx context.Context) error { return e.store.Release(ctx, in.claim.ID, owner) }
	var err error
	if in.transactional {
		once, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
		defer cancel()
		err = tell(once)
	} else {
		err = e.settle(ctx, in, "release", tell)
	}
	if err != nil {
		e.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "key not released", in.keyHash(), slog.Any("error", err))
	}
}

// complete stores an answer outside of a transaction.
func (e *Engine) complete(ctx context.Context, in *intent, owner Owner, c Completion) error {
	err := e.settle(ctx, in, "complete", func(ctx context.Context) error {
		err := e.store.Complete(ctx, in.claim.ID, owner, c)
		if errors.Is(err, ErrStaleOwner) {
			// Or the attempt before has arrived and only its answer was lost.
			if record, found, findErr := e.store.Find(ctx, in.claim.ID); findErr == nil && found && record.Owner == owner && record.State == c.State {
				return nil
			}
		}
		return err
	})
	if err != nil && !errors.Is(err, ErrStaleOwner) {
		in.count(ctx, e.telemetry.completeFailures, 0)
		e.cfg.Logger.LogAttrs(ctx, slog.LevelError, "response not stored", in.keyHash(),
			slog.String("endpoint", in.claim.Endpoint), slog.Any("error", err))
	}
	return err
}

// abandon tells the store to give up what may have been made although its answer was
// lost.
func (e *Engine) abandon(ctx context.Context, in *intent, cause error, tell func(context.Context) error) {
	if sqlerr.Retryable(cause) {
		return // the database has said that nothing happened
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := tell(ctx); err != nil {
		e.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "claim not abandoned", in.keyHash(), slog.Any("error", err))
	}
}
