package idempotency

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"

	"github.com/oncemill/oncemill/internal/boundtx"
)

// act carries out the verdict.
func (x *exchange) act(ctx context.Context, record Record, v verdict, err error) {
	switch v {
	case run:
		x.tell(ctx, (&execution{&x.intent, x}).run(ctx))
	case recoverFirst:
		x.tell(ctx, (&execution{&x.intent, x}).recover(context.WithoutCancel(ctx), record))
	case replay:
		x.replay(ctx, record)
	case reused:
		x.count(ctx, x.telemetry.mismatched, x.cfg.Answers.ReusedStatus)
		p := x.problem(ProblemKeyReused)
		p.Status = x.cfg.Answers.ReusedStatus
		x.answer(p)
	case inProgress:
		x.answerInProgress(ctx)
	case outcomeLost:
		x.answerUnknown(ctx)
	case notStored:
		p := x.problem(ProblemNotStored)
		if location := x.reveal(record).Location; location != "" {
			p.Header.Set("Location", location)
		}
		x.answer(p)
	case expired:
		x.refuse(ProblemKeyExpired)
	case tooMany:
		x.refuse(ProblemTooManyKeys)
	case tooLate:
		x.refuse(ProblemExecutionTimeout)
	case storeFailed:
		if x.cfg.Failures.FailOpen && !x.transactional {
			x.logDown(ctx, err)
			x.next.ServeHTTP(x.w, x.request(ctx))
			return
		}
		x.storeDown(ctx, err)
	}
}

// tell answers according to the ending of a run.
func (x *exchange) tell(ctx context.Context, end ending) {
	a := end.attempt
	defer a.discard()
	switch {
	case a == nil:
	case a.rec.streamed && a.panicked == nil: // all of it is there but its trailers
		x.send(ctx, a)
		return
	case a.late && !a.rec.streamed: // it has been answered
		return
	}
	switch end.outcome {
	case stored, unstored: // what could not be stored was logged; there was an effect, and this is its answer
		x.send(ctx, a)
	case released, unknown:
		switch {
		case a == nil:
			x.answerUnknown(ctx)
		case a.panicked != nil:
			x.again(ctx, a.panicked)
		case a.rec.failed != nil && x.transactional:
			x.log(ctx, slog.LevelError, "response not recorded", slog.Any("error", a.rec.failed))
			x.refuse(ProblemCommitFailed)
		default:
			x.send(ctx, a)
		}
	case timedOut:
		x.refuse(ProblemExecutionTimeout)
	case contended:
		x.refuse(ProblemContended)
	case uncommitted:
		x.refuse(ProblemCommitFailed)
	case unreachable:
		x.storeDown(ctx, end.err)
	case lostClaim:
		x.lost(ctx)
	case uncertain:
		x.refuse(ProblemCommitUnknown)
	}
}

// again passes the panic of a handler on to outer handlers, as net/http expects.
func (x *exchange) again(ctx context.Context, p *panicked) {
	if p.aborted {
		panic(http.ErrAbortHandler)
	}
	if p.value != http.ErrAbortHandler { //nolint:errorlint // a value of recover, compared as net/http does
		x.log(ctx, slog.LevelError, "handler panicked", slog.String("stack", string(p.stack)))
	}
	panic(p.value)
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
		x.answerInProgress(ctx) // somebody released it: sent again, it runs
		return
	}
	v := x.judge(record)
	if v == run {
		v = inProgress
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
	x.count(ctx, x.telemetry.replayed, res.Status)
	x.log(ctx, slog.LevelDebug, "cached response returned", slog.Int("status", res.Status))
	if err := res.writeTo(x.w); err != nil {
		x.log(ctx, slog.LevelDebug, "replay not sent", slog.Any("error", err))
	}
}

// refuse answers with a problem.
func (x *exchange) refuse(kind string) { x.answer(x.problem(kind)) }

func (x *exchange) answer(p Problem) { x.cfg.Answers.Write(x.w, x.r, p) }

func (x *exchange) withState(p *Problem) {
	if x.cfg.Answers.StatusPath != "" {
		p.State = x.cfg.Answers.StatusPath + statusToken(x.claim.ID)
	}
}

func (x *exchange) answerUnknown(ctx context.Context) {
	x.count(ctx, x.telemetry.unknown, 0)
	p := x.problem(ProblemOutcomeUnknown)
	x.withState(&p)
	x.answer(p)
}

func (x *exchange) answerInProgress(ctx context.Context) {
	p := x.problem(ProblemInProgress)
	x.withState(&p)
	switch x.cfg.Answers.InProgress {
	case InProgressTooEarly:
		p.Status = http.StatusTooEarly
	case InProgressTooManyRequests:
		p.Status = http.StatusTooManyRequests
	case InProgressAccepted:
		p.Status = http.StatusAccepted
		p.Header.Set("Location", p.State)
	case InProgressConflict, InProgressWait:
	}
	x.count(ctx, x.telemetry.inProgress, p.Status)
	x.answer(p)
}

// storeDown refuses the request, even if the handler has run.
func (x *exchange) storeDown(ctx context.Context, err error) {
	x.logDown(ctx, err)
	x.refuse(ProblemStoreUnavailable)
}

func (x *exchange) logDown(ctx context.Context, err error) {
	x.log(ctx, slog.LevelError, "idempotency store unavailable", slog.Any("error", err))
}

// start starts the handler with a new request and recorder.
func (x *exchange) start(ctx context.Context, tx *sqlTx) *attempt {
	a, ctx := x.newAttempt(ctx, tx)
	a.state.request = true
	a.rec = newRecorder(x.w, x.cfg.Responses.MaxSize, x.cfg.Responses.DropHeaders)
	a.rec.stream = x.cfg.Responses.AllowStreaming && !x.transactional
	var w http.ResponseWriter = a.rec
	if a.rec.stream {
		w = flusher{a.rec}
	}
	r := x.request(ctx)
	if x.r.MultipartForm == nil {
		a.request = r // net/http cleans up for nobody but the original
	}
	a.begin(ctx, func() { x.next.ServeHTTP(w, r) })
	return a
}

// request returns the request for the handler: everything that can be changed is a copy,
// and its body begins at the start.
func (x *exchange) request(ctx context.Context) *http.Request {
	r := x.r.Clone(ctx)
	if x.body != nil {
		r.Body = io.NopCloser(bytes.NewReader(x.body))
	}
	return r
}

// expire answers for a handler whose time is up.
func (x *exchange) expire(a *attempt) {
	if !a.rec.close() {
		return
	}
	clear(x.w.Header())
	for name, values := range a.rec.outer {
		x.w.Header()[name] = values
	}
	x.w.Header().Set("Connection", "close") // it is busy until the handler returns
	p := x.problem(ProblemExecutionTimeout)
	if !x.transactional {
		p.Detail = "Whether it had an effect is not known yet. Ask again later with the same key."
		x.withState(&p)
	}
	x.answer(p)
	_ = http.NewResponseController(x.w).Flush() // a writer that cannot flush sends it later
}

// said reads the answer. In a transaction any error has no effect; elsewhere only errors
// that blame the request are known to have none.
func (x *exchange) said(a *attempt) said {
	if a.panicked != nil || a.rec.failed != nil && x.transactional {
		return failed
	}
	switch res := a.answer(); {
	case res.Status < http.StatusBadRequest:
		return succeeded
	case x.storable(res):
		return refused
	case res.Status < http.StatusInternalServerError:
		return declined
	}
	return failed
}

// storable reports whether a response is to be stored and replayed. A response that asks
// for a retry, or passes on a downstream's that does, is not.
func (x *exchange) storable(res *response) bool {
	if !x.cfg.Responses.Storable(res.Status) {
		return false
	}
	return res.Status < http.StatusBadRequest || !res.transient()
}

// completion encodes the stored form of a response.
func (x *exchange) completion(a *attempt) (Completion, error) {
	res := a.answer()
	c := Completion{
		State: StateCompleted, Status: res.Status, ResourceID: printable(a.state.resource(), maxKey),
		Retention: x.cfg.retention(x.r, res.Status), Refuse: x.cfg.Expiry.RefuseFor,
	}
	if res.overflow && !x.cfg.Responses.Pointer || a.rec.streamed || !x.storable(res) {
		c.State = StateNotReplayable
		c.Location = printable(res.header("Location"), mostLocation)
		return x.sealed(c, nil)
	}
	return x.encoded(c, res)
}

const mostLocation = 2048

// encoded fills in the stored form of a response.
func (in *intent) encoded(c Completion, res *response) (Completion, error) {
	c.Location = printable(res.header("Location"), mostLocation)
	kept := *res
	if in.cfg.Responses.Pointer {
		kept.body, kept.Pointer = nil, true
		kept.Header = slices.DeleteFunc(slices.Clone(res.Header), func(e headerEntry) bool { return e.Name == "Content-Type" && in.cfg.Responses.Resolve == nil })
	}
	plain, err := kept.marshal()
	if err != nil {
		return c, err
	}
	return in.sealed(c, plain)
}

// recovered answers with the recovered answer.
func (x *exchange) recovered(_ context.Context, found Recovery) (*attempt, error) {
	a := &attempt{state: &current{id: x.claim.ID}, rec: newRecorder(x.w, x.cfg.Responses.MaxSize, x.cfg.Responses.DropHeaders)}
	return a, a.rec.fill(found)
}

// withoutKey runs a request that has no key and does not need one.
func (x *exchange) withoutKey(ctx context.Context) {
	if !x.transactional {
		x.next.ServeHTTP(x.w, x.r)
		return
	}
	x.claim.Endpoint = endpointOf(x.r.Method, "", x.r.Pattern)
	if !x.readBody() {
		return
	}
	x.begin()
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // TxMiddleware has looked
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), x.end)
	defer cancel()
	x.tell(ctx, x.runUnkeyed(ctx, store))
}

// runUnkeyed runs a handler in a transaction of its own, without a claim.
func (x *exchange) runUnkeyed(ctx context.Context, store *SQLStore) ending {
	t, err := store.beginPlain(ctx, x.cfg.Transactions.Isolation)
	if err != nil {
		return ending{outcome: unreachable, err: err}
	}
	defer t.rollback() // a no-op after the commit
	a := x.start(ctx, t)
	a.wait(x.deadline, x.expire)
	switch {
	case a.late:
		return ending{outcome: timedOut, attempt: a}
	case x.said(a) != succeeded:
		return ending{outcome: released, attempt: a}
	}
	if err = t.Close(ErrTxEnded); err == nil {
		err = t.commit()
	}
	switch {
	case err == nil:
		x.cfg.OnCommit()
		return ending{outcome: stored, attempt: a}
	case errors.Is(err, boundtx.ErrUnknown):
		return ending{outcome: uncertain, attempt: a, err: err}
	}
	x.log(ctx, slog.LevelError, "request not committed", slog.Any("error", err))
	return ending{outcome: uncommitted, attempt: a, err: err}
}
