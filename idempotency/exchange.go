package idempotency

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// exchange is one request and its answer.
type exchange struct {
	intent
	runner runner
	w      http.ResponseWriter
	r      *http.Request
	next   http.Handler
	body   []byte

	unanswered error // a panic that kept the answer for a handler whose time is up from its client
}

// readBody reads all of the body; false means that the request has been answered.
func (x *exchange) readBody() bool {
	body, problem := readBody(x.w, x.r, x.cfg.Requests.MaxBody)
	if problem != "" {
		x.refuse(problem)
		return false
	}
	x.body = body
	return true
}

// refuse answers with a problem.
func (x *exchange) refuse(kind string) { x.answer(x.problem(kind)) }

// refuseFor is refuse with a time after which to retry.
func (x *exchange) refuseFor(kind string, wait time.Duration, detail string) {
	p := x.problem(kind)
	p.Header.Set("Retry-After", seconds(wait))
	p.Detail = cmp.Or(detail, p.Detail)
	x.answer(p)
}

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

// start starts the handler with a new request and recorder.
func (x *exchange) start(ctx context.Context, tx *sqlTx) *attempt {
	a, ctx := x.newAttempt(ctx, tx)
	a.state.request = true
	a.rec = newRecorder(x.w, x.cfg.Responses.MaxSize)
	a.rec.stream = x.cfg.Responses.AllowStreaming && !x.transactional
	var w http.ResponseWriter = a.rec
	if a.rec.stream {
		w = flusher{a.rec}
	}
	r := x.request(ctx)
	if x.r.MultipartForm == nil {
		a.request = r // net/http cleans up only after the original
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

// expire answers for a handler whose time is up. A panic of a writer waits for the handler: its claim is
// settled first.
func (x *exchange) expire(a *attempt) {
	if !a.rec.close() {
		return
	}
	x.unanswered = nopanic.Call(func() error {
		x.answerExpired(a)
		return nil
	})
}

func (x *exchange) answerExpired(a *attempt) {
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

// report reads the answer. In a transaction any error has no effect; elsewhere only errors
// that blame the request are known to have none.
func (x *exchange) report(a *attempt) report {
	if a.panicked != nil || a.rec.failed != nil && x.transactional {
		return reportFailed
	}
	switch res := a.answer(); {
	case res.passesOn(ProblemInProgress):
		return reportDeclined
	case res.passesOn(ProblemOutcomeUnknown):
		return reportFailed
	case res.Status < http.StatusBadRequest:
		return reportSucceeded
	case x.storable(res):
		return reportRefused
	case res.Status < http.StatusInternalServerError:
		return reportDeclined
	}
	return reportFailed
}

// storable reports whether a response is to be stored and replayed. A response that asks
// for a retry, or passes on a downstream's that does, is not.
func (x *exchange) storable(res *response) bool {
	stored := false
	err := nopanic.Call(func() error {
		stored = x.cfg.Responses.Storable(res.Status)
		return nil
	})
	if err != nil {
		x.log(x.r.Context(), slog.LevelError, "panic in Responses.Storable, response not stored", slog.Any("error", err))
	}
	if !stored {
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
		if x.cfg.Responses.Redact == nil { // which gets only what is stored whole
			kept := x.kept(res)
			c.Location = printable(kept.header("Location"), mostLocation)
		}
		return x.sealed(c, nil)
	}
	redacted, err := x.redacted(res)
	if err != nil {
		x.log(x.r.Context(), slog.LevelError, "redaction failed, response not stored", slog.Any("error", err))
		c.State = StateNotReplayable
		return x.sealed(c, nil)
	}
	return x.encoded(c, redacted)
}

// recovered answers with the recovered answer.
func (x *exchange) recovered(_ context.Context, found Recovery) (*attempt, error) {
	a := &attempt{state: &current{id: x.claim.ID}, rec: newRecorder(x.w, x.cfg.Responses.MaxSize)}
	return a, a.rec.fill(found)
}
