package idempotency

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// runner runs what has been claimed, and settles the claim. It is the only place that runs
// handlers of requests and commands, in transactions and without.
//
// The difference is where the effects of an attempt are. In the transaction they are
// rolled back with it, so a failure has had no effect. Elsewhere they stay: once the
// function has been called, the outcome is unknown unless the function reports it.
type runner struct {
	groups *groups // nil: each transaction is of one request
}

// run runs the function and settles the claim. The caller reports the outcome.
func (r runner) run(ctx context.Context, x *execution) ending {
	x.at("after claim")
	ctx = context.WithoutCancel(ctx)
	x.count(ctx, x.telemetry.started, 0)
	x.log(ctx, slog.LevelDebug, "new request processing")
	if !x.transactional {
		return x.settled(ctx, x.runElsewhere(ctx))
	}
	inTime, cancel := context.WithDeadline(ctx, x.end)
	defer cancel()
	if r.groups != nil && x.shares {
		return x.settled(ctx, r.groups.run(inTime, x))
	}
	end, _ := x.runAlone(inTime)
	return x.settled(ctx, end)
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
	report := x.report(a)
	if a.late && report != reportSucceeded {
		report = reportFailed
	}
	switch {
	case report == reportSucceeded, report == reportRefused:
		return x.storeAnswer(ctx, a, outcomeUnstored)
	case report == reportDeclined, a.state.hadNoEffect(), x.cfg.Failures.Failed == FailedRelease:
		return ending{outcome: outcomeReleased, attempt: a, err: a.err}
	}
	return ending{outcome: outcomeUnknown, attempt: a, err: a.err}
}

// recover asks Config.Failures.Recover about the run of a dead owner. The lease is not kept meanwhile: one
// that never returns would keep the key from everybody.
func (r runner) recover(ctx context.Context, x *execution, record Record) ending {
	asking, cancel := context.WithDeadline(ctx, x.deadline)
	defer cancel()
	var found Recovery
	err := nopanic.Call(func() (err error) {
		found, err = x.cfg.Failures.Recover(asking, x.reveal(record))
		return err
	})
	if err == nil {
		err = x.check(found)
	}
	switch {
	case err == nil && found.RunAgain:
		// Others may have taken the key over meanwhile, and have asked and run, too.
		if err = cmp.Or(x.renew(asking), asking.Err()); err == nil {
			return r.run(ctx, x)
		}
		if errors.Is(err, ErrStaleOwner) {
			return x.settled(ctx, ending{outcome: outcomeLostClaim, err: err})
		}
	case err == nil && found.Status != 0:
		a, failure := x.recovered(ctx, found)
		if failure == nil {
			return x.settled(ctx, x.storeAnswer(ctx, a, outcomeUnstored))
		}
		a.discard()
		err = failure
	}
	if err != nil {
		x.log(ctx, slog.LevelWarn, "outcome not found out", slog.Any("error", err))
		err = fmt.Errorf("recover: %w", err)
	}
	return x.settled(ctx, ending{outcome: outcomeUnknown, err: err}) // the next one may ask again
}
