package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
)

// run runs the handler for a claim that is ours.
func (x *exchange) run(ctx context.Context, record Record) {
	x.at("after claim")
	x.owner = record.Owner
	ctx, x.state = contextWithRun(context.WithoutCancel(ctx), x.claim.ID)
	x.count(ctx, x.telemetry.started, 0)
	x.log(ctx, "new request processing")
	if x.transactional {
		x.runInTx(ctx)
	} else {
		x.runSnapshot(ctx)
	}
}

// withoutKey runs a request that has no key and needs none.
func (x *exchange) withoutKey(ctx context.Context) {
	if !x.transactional {
		x.next.ServeHTTP(x.w, x.r)
		return
	}
	if !x.readBody() {
		return
	}
	x.unkeyed(ctx)
}

// again tells the panic of a handler to whoever is outside, as net/http expects.
func (x *exchange) again(ctx context.Context, p *panicked) {
	if p.aborted {
		panic(http.ErrAbortHandler)
	}
	if p.value != http.ErrAbortHandler { //nolint:errorlint // a value of recover, compared as net/http does
		x.cfg.Logger.LogAttrs(ctx, slog.LevelError, "handler panicked", x.keyHash(),
			slog.String("endpoint", x.claim.Endpoint), slog.String("stack", string(p.stack)))
	}
	panic(p.value)
}

// runInTx runs the handler in a transaction, which it may share.
func (x *exchange) runInTx(ctx context.Context) {
	// A transaction that outlives its lease is worth nothing.
	ctx, cancel := context.WithDeadline(ctx, x.began.Add(x.cfg.Lease))
	defer cancel()
	if x.groups == nil {
		x.runAlone(ctx)
		return
	}
	x.groups.run(ctx, x)
}

// runAlone runs the handler in a transaction of its own, again where that lost against
// another. It tells how the last one ended, and how many were lost before.
func (x *exchange) runAlone(ctx context.Context) (outcome txOutcome, lost int) {
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // TxMiddleware has looked
	}
	for ; ; lost++ {
		began := time.Now()
		t, err := store.begin(ctx, x.claim.ID, x.owner, x.cfg.Isolation, x.cfg.Timeout)
		x.telemetry.latency(ctx, "begin", began, err)
		if err != nil {
			x.release(ctx, &x.intent, x.owner)
			x.storeDown(ctx, err)
			return unreachable, lost
		}
		if outcome = x.attempt(ctx, t, lost); outcome != runAgain {
			return outcome, lost
		}
	}
}

// attempt runs the handler once, and answers, or returns runAgain to be called again.
func (x *exchange) attempt(ctx context.Context, t *sqlTx, try int) txOutcome {
	defer t.rollback()
	deadline := x.began.Add(x.cfg.Timeout)
	called := x.start(ctx, t)
	rec := called.rec
	defer rec.discard()
	p, timedOut := called.finished(0, nil)
	x.at("after effect")
	if p != nil || timedOut {
		t.rollback()
		x.release(ctx, &x.intent, x.owner)
		if p != nil && !timedOut {
			x.again(ctx, p)
		}
		return rolledBack
	}
	res := rec.result()
	if res.Status >= http.StatusBadRequest || rec.failed != nil {
		t.rollback()
		if t.beaten.Load() && x.yield(deadline, try) {
			return runAgain // it may have answered what a conflict in the database made it think
		}
		x.withoutEffect(ctx, rec, res)
		return rolledBack
	}
	c, err := x.completion(res, false)
	if err != nil {
		t.rollback()
		x.failed(ctx, err)
		return rolledBack
	}
	outcome, err := x.finish(ctx, &x.intent, t, x.owner, c)
	t.rollback() // a no-op after the commit
	if outcome == runAgain && x.yield(deadline, try) {
		return runAgain
	}
	x.conclude(ctx, rec, c, outcome, err)
	if outcome == runAgain {
		return rolledBack // there is no time
	}
	return outcome
}

// conclude answers as the transaction has ended.
func (x *exchange) conclude(ctx context.Context, rec *recorder, c Completion, outcome txOutcome, err error) {
	switch outcome {
	case committed:
		x.committed(ctx, rec, c)
	case lostClaim:
		x.lost(ctx, err)
	case uncertain:
		x.count(ctx, x.telemetry.completeFailures, http.StatusServiceUnavailable)
		x.refuse(ProblemCommitUnknown)
	case unreachable:
		x.count(ctx, x.telemetry.completeFailures, http.StatusServiceUnavailable)
		fallthrough
	case runAgain:
		x.release(ctx, &x.intent, x.owner)
		x.storeDown(ctx, err)
	case rolledBack:
		x.failed(ctx, err)
	}
}

// committed sends the answer, which is stored.
func (x *exchange) committed(ctx context.Context, rec *recorder, c Completion) {
	x.cfg.OnCommit()
	x.cache(ctx, c)
	x.send(ctx, rec)
}

// cache keeps a stored response near, once it has committed.
func (x *exchange) cache(ctx context.Context, c Completion) {
	if x.cfg.Cache == nil || c.State != Completed {
		return
	}
	x.cfg.Cache.Put(ctx, Record{
		ID: x.claim.ID, Caller: x.claim.Caller, Fingerprint: x.claim.Fingerprint, State: c.State, Owner: x.owner,
		Endpoint: x.claim.Endpoint, Status: c.Status, Response: c.Response, Location: c.Location, ResourceID: c.ResourceID,
		// Counted from before the commit, so that it does not outlive the record.
		ExpiresIn: c.Retention - time.Since(x.began),
	})
}

func (x *exchange) send(ctx context.Context, rec *recorder) {
	x.log(ctx, "request completed", slog.Int("status", rec.status))
	x.at("before answer")
	if err := rec.sendAll(); err != nil {
		x.log(ctx, "answer not sent", slog.Any("error", err))
	}
	if x.at("after answer"); ctx.Err() != nil {
		x.log(ctx, "lease ended before the answer was sent")
	}
}

// failed answers a handler whose transaction could not be committed, through no
// fault of the store.
func (x *exchange) failed(ctx context.Context, err error) {
	x.count(ctx, x.telemetry.completeFailures, http.StatusInternalServerError)
	x.cfg.Logger.LogAttrs(ctx, slog.LevelError, "request not committed", x.keyHash(),
		slog.String("endpoint", x.claim.Endpoint), slog.Any("error", err))
	x.release(ctx, &x.intent, x.owner)
	x.refuse(ProblemCommitFailed)
}

// lost answers after somebody else has taken the claim over, from what stands
// there now.
func (x *exchange) lost(ctx context.Context, err error) {
	x.count(ctx, x.telemetry.stale, 0)
	x.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "key lost to another owner", x.keyHash(),
		slog.String("endpoint", x.claim.Endpoint), slog.Any("error", err))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	record, found, err := x.store.Find(ctx, x.claim.ID)
	switch {
	case err != nil:
		x.storeDown(ctx, err)
		return
	case !found:
		x.answerInProgress(ctx) // somebody released it: sent again, it runs
		return
	}
	v := x.judge(&x.intent, record)
	if v == run {
		v = inProgress
	}
	x.act(ctx, record, v, nil)
}

// withoutEffect answers with an error of the handler, whose transaction has been
// rolled back, and stores it if it would be the same again.
func (x *exchange) withoutEffect(ctx context.Context, rec *recorder, res *response) {
	if rec.failed != nil {
		x.failed(ctx, rec.failed)
		return
	}
	if !x.cfg.Storable(res.Status) {
		x.release(ctx, &x.intent, x.owner)
		x.send(ctx, rec)
		return
	}
	x.store4xx(ctx, rec, res)
}

func (x *exchange) store4xx(ctx context.Context, rec *recorder, res *response) {
	c, err := x.completion(res, false)
	if err == nil {
		err = x.complete(ctx, &x.intent, x.owner, c)
	}
	switch {
	case errors.Is(err, ErrStaleOwner):
		x.lost(ctx, err)
	case err != nil:
		// There was no effect: rather no answer than one that may differ later.
		x.storeDown(ctx, err)
	default:
		x.cache(ctx, c)
		x.send(ctx, rec)
	}
}

// runSnapshot runs the handler without a transaction. The claim is kept for as
// long as the handler runs.
func (x *exchange) runSnapshot(ctx context.Context) {
	renew := func() {
		renewing, cancel := context.WithTimeout(ctx, x.cfg.Lease/3)
		defer cancel()
		if err := x.store.Extend(renewing, x.claim.ID, x.owner, x.cfg.Lease); err != nil {
			x.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "lease not extended", x.keyHash(), slog.Any("error", err))
		}
	}
	called := x.start(ctx, nil)
	rec := called.rec
	defer rec.discard()
	p, timedOut := called.finished(x.cfg.Lease/3, renew)
	x.at("after effect")
	if p != nil {
		x.release(ctx, &x.intent, x.owner)
		if !timedOut {
			x.again(ctx, p)
		}
		return
	}
	res := rec.result()
	streamed := rec.streamed
	if res.Status >= http.StatusBadRequest && !streamed && !x.cfg.Storable(res.Status) {
		x.release(ctx, &x.intent, x.owner)
		if !timedOut {
			x.send(ctx, rec)
		}
		return
	}
	c, err := x.completion(res, streamed)
	if err == nil {
		x.at("before commit")
		err = x.complete(ctx, &x.intent, x.owner, c)
		x.at("after commit")
	}
	switch {
	case timedOut:
	case errors.Is(err, ErrStaleOwner):
		if !streamed {
			x.lost(ctx, err)
		}
	default:
		// If it could not be stored, there was an effect all the same, and this is
		// its answer.
		if err == nil {
			x.cache(ctx, c)
		}
		x.send(ctx, rec)
	}
}

// unkeyed runs a handler in a transaction of its own, without a claim.
func (x *exchange) unkeyed(ctx context.Context) {
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // TxMiddleware has looked
	}
	x.claim.Endpoint = endpointOf(x.r.Method, x.r.URL.Path)
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), x.began.Add(x.cfg.Lease))
	defer cancel()
	t, err := store.beginPlain(ctx, x.cfg.Isolation)
	if err != nil {
		x.storeDown(ctx, err)
		return
	}
	defer t.rollback()
	called := x.start(ctx, t)
	rec := called.rec
	defer rec.discard()
	p, timedOut := called.finished(0, nil)
	switch {
	case timedOut:
		return
	case p != nil:
		t.rollback()
		x.again(ctx, p)
	}
	if rec.result().Status < http.StatusBadRequest && rec.failed == nil {
		if err = t.Close(ErrTxEnded); err == nil {
			err = t.commit()
		}
		if err != nil {
			x.cfg.Logger.LogAttrs(ctx, slog.LevelError, "request not committed", slog.String("endpoint", x.claim.Endpoint), slog.Any("error", err))
			if errors.Is(err, boundtx.ErrUnknown) {
				x.refuse(ProblemCommitUnknown)
				return
			}
			x.refuse(ProblemCommitFailed)
			return
		}
		x.cfg.OnCommit()
	}
	t.rollback()
	x.send(ctx, rec)
}

// recoverThenRun asks what became of the run of a dead owner.
func (x *exchange) recoverThenRun(ctx context.Context, record Record) {
	x.owner = record.Owner
	found, err := x.cfg.Recover(ctx, record)
	switch {
	case err == nil && found.RunAgain:
		x.run(ctx, record)
		return
	case err == nil && found.Status != 0:
		_, x.state = contextWithRun(ctx, x.claim.ID)
		rec := newRecorder(x.w, x.cfg.MaxResponse, x.cfg.DropHeaders)
		defer rec.discard()
		for name, values := range found.Header {
			rec.Header()[name] = values
		}
		rec.WriteHeader(found.Status)
		if len(found.Body) > 0 {
			_, err = rec.Write(found.Body)
		}
		if err == nil {
			x.store4xx(ctx, rec, rec.result())
			return
		}
	}
	// Still unknown: the next one may ask again.
	if extendErr := x.store.Extend(ctx, x.claim.ID, x.owner, 0); extendErr != nil {
		x.log(ctx, "lease not ended", slog.Any("error", extendErr))
	}
	x.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "outcome not found out", x.keyHash(),
		slog.String("endpoint", x.claim.Endpoint), slog.Any("error", err))
	x.act(ctx, record, outcomeLost, nil)
}
