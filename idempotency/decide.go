package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

// decision is what to do about an intent.
type decision int

const (
	decisionRun         decision = iota // the claim is ours
	decisionRecover                     // the claim is ours, after its owner died: ask Config.Failures.Recover
	decisionReplay                      // the record holds the answer
	decisionReused                      // the key came with another request
	decisionInProgress                  // another owner runs it
	decisionUnknown                     // an owner ran it and died
	decisionNotStored                   // it ran, and its response was not stored
	decisionExpired                     // it ran, and its response is gone
	decisionTooMany                     // the caller has too many keys outstanding
	decisionStoreFailed                 // the store did not answer
	decisionOverQuota                   // the caller has used up its quota
	decisionRateLimited                 // Config.Keys.RateLimit refuses it
	decisionRefused                     // Config.Keys.RateLimit has failed
	decisionTooLate                     // the claim came when no time was left, and was given back
)

// decide claims the key, or decides from its record what to do. It waits for the end of
// another run if Config.Answers.InProgress is InProgressWait.
func (in *intent) decide(ctx context.Context) (Record, decision, error) {
	claiming, cancel := in.claimContext(ctx)
	defer cancel()
	if v, err := in.withinRate(claiming); v != decisionRun {
		return Record{}, v, err
	}
	record, v, err := in.tryClaim(claiming)
	if err == nil {
		in.logWorks(ctx)
	}
	if v != decisionInProgress || in.cfg.Answers.InProgress != InProgressWait {
		return record, v, err
	}
	return in.wait(ctx)
}

// judgeTries is how often a claim that changed hands meanwhile is read again.
const judgeTries = 5

// tryClaim claims the key, or decides from its record what to do. With decisionRun and
// decisionRecover the intent has become the owner.
func (in *intent) tryClaim(ctx context.Context) (_ Record, v decision, _ error) {
	defer func() {
		if in.claiming != nil {
			in.claiming.answered()
			in.claiming = nil
		}
		if v != decisionRun && v != decisionRecover {
			in.uncharge()
		}
	}()
	if record, ok := in.cached(ctx); ok {
		return record, decisionReplay, nil
	}
	if in.cfg.Keys.MaxOutstanding != Unlimited {
		if v, record, err := in.limit(ctx); v != decisionRun {
			return record, v, err
		}
	}
	if in.cfg.Keys.Quota.limited() && !in.unlimited {
		if v, record, err := in.withinQuota(ctx); v != decisionRun {
			return record, v, err
		}
	}
	for range judgeTries {
		began := time.Now()
		record, granted, err := in.claimKey(ctx, in.claim)
		in.telemetry.latency(ctx, "claim", began, err)
		failure := decisionStoreFailed
		if granted && err == nil {
			failure, err = decisionTooLate, ctx.Err()
		}
		switch {
		case err != nil:
			// Nothing has run under a claim that may have been granted.
			owner := Owner{Token: in.claim.Token, Fence: 1}
			gone := in.abandon(ctx, err, func(ctx context.Context) error { return in.store.Release(ctx, in.claim.ID, owner) })
			if !gone && (in.transactional || !in.cfg.Failures.FailOpen) { // which runs the handler all the same
				in.late.add(owner)
			}
			return Record{}, failure, err
		case granted:
			in.take(record)
			return record, decisionRun, nil
		}
		if in.late.made(record) {
			if err := in.store.Release(ctx, in.claim.ID, record.Owner); err != nil && !errors.Is(err, ErrStaleOwner) {
				return Record{}, decisionStoreFailed, err
			}
			continue
		}
		v := in.judge(record)
		if v != decisionRun {
			if v == decisionReplay && in.cfg.Responses.Cache != nil {
				in.cfg.Responses.Cache.Put(ctx, record)
			}
			return record, v, nil
		}
		began = time.Now()
		from := record.Owner
		if record.LeaseLeft > 0 { // of a crashed process
			if err := in.store.Extend(ctx, in.claim.ID, from, 0); err != nil && !errors.Is(err, ErrStaleOwner) {
				return Record{}, decisionStoreFailed, err
			}
		}
		record, granted, err = in.store.TakeOver(ctx, in.claim, from)
		in.telemetry.latency(ctx, "take_over", began, err)
		if granted && err == nil {
			failure, err = decisionTooLate, ctx.Err()
		}
		if err != nil {
			// Something may have run under a claim that may have been taken over.
			owner := Owner{Token: in.claim.Token, Fence: from.Fence + 1}
			in.abandon(ctx, err, func(ctx context.Context) error { return in.store.Extend(ctx, in.claim.ID, owner, 0) })
			return Record{}, failure, err
		}
		if granted {
			in.take(record)
			in.count(ctx, in.telemetry.takeovers, 0)
			in.log(ctx, slog.LevelWarn, "key taken over", slog.Int64("fence", record.Owner.Fence))
			if !in.transactional && in.cfg.Failures.Crashed == CrashedRecover {
				return record, decisionRecover, nil
			}
			return record, decisionRun, nil
		}
	}
	// The claim is changing hands, or its owner is just completing it.
	return Record{}, decisionInProgress, nil
}

// take makes the intent the owner of a record. A claim that was taken over has kept its
// fingerprint, possibly of another version.
func (in *intent) take(record Record) {
	in.owner, in.claim.Fingerprint = record.Owner, record.Fingerprint
}

// cached returns the cache's record, if it is a readable answer to this request. For
// anything else the store has more recent data.
func (in *intent) cached(ctx context.Context) (Record, bool) {
	if in.cfg.Responses.Cache == nil {
		return Record{}, false
	}
	record, ok := in.cfg.Responses.Cache.Get(ctx, in.claim.ID)
	ok = ok && record.ID == in.claim.ID && record.State == StateCompleted && in.judge(record) == decisionReplay
	if ok {
		var err error
		if record.plain, err = in.open(ctx, record); err != nil {
			in.log(ctx, slog.LevelWarn, "cached response not readable", slog.Any("error", err))
			ok = false
		}
	}
	if !ok {
		in.count(ctx, in.telemetry.cacheMisses, 0)
		return Record{}, false
	}
	in.count(ctx, in.telemetry.cacheHits, 0)
	return record, true
}

// judge decides about the record that prevented a claim; decisionRun means that it may be
// taken over. It first checks whether the request is the same.
func (in *intent) judge(record Record) decision {
	if record.State == StateExpired {
		return decisionExpired
	}
	if !record.Fingerprint.matches(in.claim.Fingerprint) {
		return decisionReused
	}
	switch record.State {
	case StateCompleted:
		return decisionReplay
	case StateNotReplayable:
		return decisionNotStored
	}
	switch {
	case record.LeaseLeft > 0 && !fromCrashed(record.Owner, in.cfg.Failures.UniqueName):
		return decisionInProgress
	case !in.transactional && in.cfg.Failures.Crashed == CrashedUnknown:
		return decisionUnknown
	}
	return decisionRun
}

// wait polls the key until it is no longer in progress and then decides again. It repeats
// that as often as another copy is faster, until the time is up.
func (in *intent) wait(ctx context.Context) (Record, decision, error) {
	const least, most = 5 * time.Millisecond, 200 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, in.cfg.Answers.WaitTimeout)
	defer cancel()
	for pause := least; ; pause = min(2*pause, most) {
		if !sleep.For(ctx, pause) {
			return Record{}, decisionInProgress, nil
		}
		began := time.Now()
		record, found, err := in.store.Find(ctx, in.claim.ID)
		in.telemetry.latency(ctx, "find", began, err)
		switch {
		case ctx.Err() != nil:
			return Record{}, decisionInProgress, nil
		case err != nil:
			return Record{}, decisionStoreFailed, err
		case found && !in.late.made(record) && in.judge(record) == decisionInProgress:
			continue
		}
		in.begin()
		claiming, cancel := in.claimContext(ctx)
		record, v, err := in.tryClaim(claiming)
		cancel()
		if v != decisionInProgress {
			return record, v, err
		}
		pause = least
	}
}

// limit returns decisionRun if the caller may claim another key. A key that the caller has
// already is not counted as another. Of the claims of one caller one counts, and the others
// wait for it: if all counted at once, all would find room. Claims that the store has not answered
// may be in no count. Where they may take what room is left, the claim waits and counts again.
func (in *intent) limit(ctx context.Context) (decision, Record, error) {
	a := in.limits.of(in.claim.Caller)
	for {
		taken, other, self := a.take()
		if taken {
			in.claiming = a
			return decisionRun, Record{}, nil
		}
		if self != nil {
			v, record, again, err := in.countOutstanding(ctx, a, self)
			if again {
				continue
			}
			return v, record, err
		}
		if err := other.wait(ctx); err != nil {
			return decisionStoreFailed, Record{}, err
		}
	}
}

// countOutstanding counts, and reports whether to do so again.
func (in *intent) countOutstanding(ctx context.Context, a *allowance, self *counting) (_ decision, _ Record, again bool, _ error) {
	left := 0
	defer func() { a.counted(self, left) }()
	claiming := a.underWay()
	began := time.Now()
	n, err := in.store.Outstanding(ctx, in.claim.Caller, in.cfg.Keys.MaxOutstanding)
	in.telemetry.latency(ctx, "outstanding", began, err)
	if err != nil {
		return decisionStoreFailed, Record{}, false, err
	}
	if n < in.cfg.Keys.MaxOutstanding {
		var admitted bool
		left, admitted = a.admit(n, claiming, in.cfg.Keys.MaxOutstanding)
		switch {
		case admitted:
			in.claiming = a
			return decisionRun, Record{}, false, nil
		case !sleep.For(ctx, countWait): // so long do others wait for this count
			return decisionStoreFailed, Record{}, false, ctx.Err()
		}
		return decisionRun, Record{}, true, nil
	}
	record, found, err := in.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return decisionStoreFailed, Record{}, false, err
	case !found:
		return decisionTooMany, Record{}, false, nil
	}
	v := in.judge(record)
	if v == decisionRun && record.LeaseLeft <= 0 {
		v, record = decisionTooMany, Record{} // to take it over would make it one more
	}
	return v, record, false, nil
}
