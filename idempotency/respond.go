package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// act carries out the decision.
func (x *exchange) act(ctx context.Context, record Record, v decision, err error) {
	if refused, ok := decisionStates[v]; ok {
		x.state = refused
	}
	switch v {
	case decisionRun:
		x.respond(ctx, x.runner.run(ctx, &execution{&x.intent, x}))
	case decisionRecover:
		x.respond(ctx, x.runner.recover(context.WithoutCancel(ctx), &execution{&x.intent, x}, record))
	case decisionReplay:
		x.replay(ctx, record)
	case decisionReused:
		x.log(ctx, slog.LevelDebug, eventMismatch)
		x.count(ctx, x.telemetry.mismatched, x.cfg.Answers.ReusedStatus)
		p := x.problem(ProblemKeyReused)
		p.Status = x.cfg.Answers.ReusedStatus
		x.answer(p)
	case decisionInProgress:
		x.log(ctx, slog.LevelDebug, eventConflict)
		x.answerInProgress(ctx)
	case decisionUnknown:
		x.answerUnknown(ctx)
	case decisionNotStored:
		p := x.problem(ProblemNotStored)
		if location := x.reveal(record).Location; location != "" {
			p.Header.Set("Location", location)
		}
		x.answer(p)
	case decisionExpired:
		x.refuse(ProblemKeyExpired)
	case decisionTooMany:
		x.refuse(ProblemTooManyKeys)
	case decisionOverQuota:
		x.refuseFor(ProblemOverQuota, x.retryIn, "")
	case decisionRateLimited:
		var limit *RateLimitError
		_ = errors.As(err, &limit) // withinRate has looked
		x.refuseFor(ProblemRateLimited, x.retryIn, limit.Detail)
	case decisionRefused:
		x.log(ctx, slog.LevelError, "rate limit failed, request refused", slog.Any("error", err))
		x.refuse(ProblemInternal)
	case decisionTooLate:
		x.refuse(ProblemExecutionTimeout)
	case decisionStoreFailed:
		if x.cfg.Failures.FailOpen && !x.transactional {
			x.state = stateUnprotected
			x.logDown(ctx, err)
			x.next.ServeHTTP(x.w, x.request(ctx))
			return
		}
		x.storeDown(ctx, err)
	}
}

// respond answers according to the ending of a run.
func (x *exchange) respond(ctx context.Context, end ending) {
	a := end.attempt
	defer a.discard()
	switch {
	case a == nil:
	case a.rec.streamed && a.panicked == nil: // everything but its trailers has been sent
		x.send(ctx, a)
		return
	case a.late && !a.rec.streamed: // it has been answered
		x.logPanic(ctx, a.panicked)
		if x.unanswered != nil {
			x.log(ctx, slog.LevelError, "answer not written", slog.Any("error", x.unanswered), slog.String("stack", nopanic.Stack(x.unanswered)))
			panic(http.ErrAbortHandler) // net/http would send an empty success
		}
		return
	}
	switch end.outcome {
	case outcomeStored, outcomeUnstored: // what could not be stored was logged; there was an effect, and this is its answer
		if a.rec.failed != nil { // not in a transaction: it was rolled back
			x.notRecorded(ctx, a, ProblemNotStored)
			return
		}
		x.send(ctx, a)
	case outcomeReleased, outcomeUnknown:
		switch {
		case a == nil:
			x.answerUnknown(ctx)
		case a.panicked != nil:
			x.repanic(ctx, a.panicked)
		case a.rec.failed != nil && x.transactional:
			x.notRecorded(ctx, a, ProblemCommitFailed)
		case a.rec.failed != nil:
			x.notRecorded(ctx, a, ProblemInternal)
		default:
			x.send(ctx, a)
		}
	case outcomeTimedOut:
		x.refuse(ProblemExecutionTimeout)
	case outcomeContended:
		x.refuse(ProblemContended)
	case outcomeUncommitted:
		x.refuse(ProblemCommitFailed)
	case outcomeUnreachable:
		x.storeDown(ctx, end.err)
	case outcomeLostClaim:
		x.lost(ctx)
	case outcomeUncertain:
		x.uncertain()
	}
}

// notRecorded answers with a problem for a handler whose response is not whole: the disk was full, for example.
func (x *exchange) notRecorded(ctx context.Context, a *attempt, kind string) {
	x.log(ctx, slog.LevelError, "response not recorded", slog.Any("error", a.rec.failed))
	x.refuse(kind)
}

// uncertain answers for a commit whose outcome is unknown. A copy with the same key finds it out; a request
// without a key has no copy, and sent again it would be another.
func (x *exchange) uncertain() {
	if x.claim.ID != (ID{}) {
		x.refuse(ProblemCommitUnknown)
		return
	}
	p := x.problem(ProblemInternal)
	p.Detail = "Whether the request had an effect is not known."
	x.answer(p)
}

// repanic passes the panic of a handler on to outer handlers, as net/http expects.
func (x *exchange) repanic(ctx context.Context, p *panicked) {
	x.logPanic(ctx, p)
	if p.aborted {
		panic(http.ErrAbortHandler)
	}
	panic(p.value)
}

// logPanic logs the panic of a handler, if there was one.
func (x *exchange) logPanic(ctx context.Context, p *panicked) {
	if p != nil && !p.aborted && p.value != http.ErrAbortHandler { //nolint:errorlint // a value of recover, compared as net/http does
		x.log(ctx, slog.LevelError, "handler panicked", slog.Any("error", p.value), slog.String("stack", string(p.stack)))
	}
}

// lost answers from the current record after another owner has taken over the claim.
func (x *exchange) lost(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	record, found, err := x.store.Find(ctx, x.claim.ID)
	switch {
	case err != nil:
		x.storeDown(ctx, err)
		return
	case !found:
		x.answerInProgress(ctx) // it was released: sent again, it runs
		return
	}
	v := x.judge(record)
	if v == decisionRun {
		v = decisionInProgress
	}
	x.act(ctx, record, v, nil)
}

// send sends the answer of an attempt.
func (x *exchange) send(ctx context.Context, a *attempt) {
	x.log(ctx, slog.LevelDebug, "request completed", slog.Int("status", a.rec.status))
	x.at("before answer")
	if err := a.rec.sendAll(); err != nil {
		x.log(ctx, slog.LevelDebug, "answer not sent", slog.Any("error", err))
	}
	x.at("after answer")
}

// replay sends the stored response.
func (x *exchange) replay(ctx context.Context, record Record) {
	res, err := x.response(ctx, record)
	if err != nil {
		x.log(ctx, slog.LevelError, "stored response not readable", slog.Any("error", err))
		x.refuse(ProblemStoreUnavailable)
		return
	}
	x.sawReplay(record)
	x.count(ctx, x.telemetry.replayed, res.Status)
	x.log(ctx, slog.LevelDebug, "cached response returned", slog.Int("status", res.Status))
	if err := res.writeTo(x.w); err != nil {
		x.log(ctx, slog.LevelDebug, "replay not sent", slog.Any("error", err))
	}
}

// response returns the stored response of a record.
func (x *exchange) response(ctx context.Context, record Record) (*response, error) {
	plain, err := x.open(ctx, record)
	if err != nil {
		return nil, err
	}
	res, err := unmarshalResponse(plain)
	if err != nil {
		return nil, err
	}
	if res.Pointer && x.cfg.Responses.Resolve != nil {
		if res.body, err = x.cfg.Responses.Resolve(ctx, x.reveal(record)); err != nil {
			return nil, fmt.Errorf("resolve: %w", err)
		}
	}
	return res, nil
}
