package idempotency

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
)

// TxMiddleware runs handlers in a transaction that they find with
// [TxFromContext]: what they write there, what they publish to the outbox, and
// their response, which is kept back until then, commit together. It needs a
// [SQLStore] and panics, when it is called, with [ErrNotTransactional] without
// one.
//
// A response below 400 commits. Any other one, a panic, a timeout roll back, and
// are stored too if Config.Storable says so. A serialization failure runs the
// handler again, so it must have no other effects than those in the transaction.
//
// With Config.GroupSize requests that come at the same time share a transaction, and
// the cost of its commit. They have their own keys, handles and outcomes. Handlers of a
// group run one after the other, for a quarter of a second in all; if one fails in any
// way, or answers with an error after it has asked the database for something (on SQLite:
// with any error), the group is rolled back, that one runs again alone, and the others again without it. One that
// takes longer than a second has its context ended and runs again alone, as do all of its
// group. So a handler does not belong here that takes long, that often refuses, or that
// changes the transaction: settings (set local, a role, a search path) and savepoints of the
// same name would reach the others. Groups become smaller, down to one request, when they
// take too long, and when their locks are in the way of others: after a deadlock, a
// serialization failure, or a wait for a lock of 100 ms; they grow again slowly. It pays
// where dozens of requests come at once.
func (e *Engine) TxMiddleware(next http.Handler) http.Handler {
	if _, ok := e.store.(*SQLStore); !ok {
		panic(ErrNotTransactional)
	}
	return e.middleware(next, true)
}

// Middleware runs handlers whose effects are elsewhere, and stores what they
// answered. If the process dies between the effect and the storing, whether there
// was an effect is unknown; see Config.Crashed.
func (e *Engine) Middleware(next http.Handler) http.Handler { return e.middleware(next, false) }

func (e *Engine) middleware(next http.Handler, transactional bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(e.cfg.Methods, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		(&exchange{Engine: e, w: w, r: r, next: next, intent: intent{transactional: transactional, began: time.Now()}}).serve(r.Context())
	})
}

// exchange is one request and its answer.
type exchange struct {
	*Engine
	intent
	w     http.ResponseWriter
	r     *http.Request
	next  http.Handler
	body  []byte
	owner Owner
	state *current
}

func (x *exchange) serve(ctx context.Context) {
	key, problem := x.key()
	if problem != "" {
		x.refuse(problem)
		return
	}
	if key == "" {
		x.withoutKey(ctx)
		return
	}
	if !x.identify(ctx, key) {
		return
	}
	x.log(ctx, "idempotency key received")
	x.count(ctx, x.telemetry.received, 0)
	// A client that breaks off must not leave a claim behind that nobody runs.
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.cfg.Timeout)
	defer cancel()
	record, v, err := x.decide(patient, &x.intent)
	if v == inProgress && x.cfg.InProgress == Wait {
		record, v, err = x.wait(ctx, &x.intent)
	}
	x.act(ctx, record, v, err)
}

// key returns the key, "" for none where none is needed, or the problem with it.
func (x *exchange) key() (key, problem string) {
	values := x.r.Header.Values(x.cfg.Header)
	switch {
	case len(values) == 0 && x.cfg.Optional:
		return "", ""
	case len(values) == 0:
		return "", ProblemKeyMissing
	case len(values) > 1:
		return "", ProblemKeyInvalid
	}
	key, err := ParseKey(values[0])
	if err != nil {
		return "", ProblemKeyInvalid
	}
	if x.cfg.TrimSpace {
		if key = strings.TrimSpace(key); key == "" {
			return "", ProblemKeyInvalid
		}
	}
	if x.cfg.StrictUUID {
		if !isUUID(key) {
			return "", ProblemKeyInvalid
		}
		key = strings.ToLower(key)
	}
	return key, ""
}

// identify reads the request and makes its claim; false means that it has been
// answered.
func (x *exchange) identify(ctx context.Context, key string) bool {
	if x.cfg.Scope == nil {
		x.cfg.Logger.ErrorContext(ctx, "idempotency scope missing", "problem", "set Config.Scope")
		x.refuse(ProblemInternal)
		return false
	}
	scope, err := x.cfg.Scope(x.r)
	if err != nil {
		x.cfg.Logger.ErrorContext(ctx, "idempotency scope failed", "error", err)
		x.refuse(ProblemInternal)
		return false
	}
	if scope.Route == "" {
		if scope.Route = x.r.Pattern; scope.Route == "" {
			scope.Route = x.r.URL.Path
		}
	}
	if !x.readBody() {
		return false
	}
	fingerprint, err := fingerprintRequest(x.r, scope.Route, x.body, x.cfg.Body, x.cfg.FingerprintHeaders)
	if err != nil {
		x.refuse(ProblemUnsupportedBody)
		return false
	}
	x.claim = x.newClaim(x.transactional)
	x.claim.ID = hashID(x.cfg.Secret, "oncemill idempotency key", scope.Tenant, scope.Principal, x.r.Method, scope.Route, key)
	x.claim.Caller = hashCaller(x.cfg.Secret, scope)
	x.claim.Fingerprint = fingerprint
	x.claim.Endpoint = endpointOf(x.r.Method, scope.Route)
	x.claim.CorrelationID = printable(x.r.Header.Get(x.cfg.CorrelationHeader), maxKey)
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		x.claim.TraceID = span.TraceID().String()
	}
	if x.cfg.TenantAttribute {
		x.tenant = scope.Tenant
	}
	return true
}

func hashCaller(secret []byte, scope Scope) (c Caller) {
	id := hashID(secret, "oncemill idempotency caller", scope.Tenant, scope.Principal)
	copy(c[:], id[:])
	return c
}

// endpointOf names the operation for operators. A pattern of http.ServeMux holds
// the method already.
func endpointOf(method, route string) string {
	if !strings.HasPrefix(route, method+" ") {
		route = method + " " + route
	}
	return printable(route, maxKey)
}

// printable makes foreign text fit for a column, a log or a metric.
func printable(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
}

// readBody reads all of the body; false means that the request has been answered.
func (x *exchange) readBody() bool {
	if x.r.ContentLength > x.cfg.MaxBody {
		// Before a byte is read: a client that expects 100-continue sends none.
		x.refuse(ProblemBodyTooLarge)
		return false
	}
	if x.r.Body == nil || x.r.Body == http.NoBody {
		return true
	}
	body, err := io.ReadAll(http.MaxBytesReader(x.w, x.r.Body, x.cfg.MaxBody))
	if err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			x.refuse(ProblemBodyTooLarge)
		} else {
			x.refuse(ProblemUnsupportedBody) // the client broke off, or sent nonsense
		}
		return false
	}
	x.body = body
	return true
}

func (x *exchange) log(ctx context.Context, event string, attrs ...slog.Attr) {
	x.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, event, //nolint:sloglint // its callers have constants
		append([]slog.Attr{x.keyHash(), slog.String("endpoint", x.claim.Endpoint)}, attrs...)...)
}

// refuse answers with a problem.
func (x *exchange) refuse(kind string) { x.answer(x.problem(kind)) }

func (x *exchange) answer(p Problem) { x.cfg.Answer(x.w, x.r, p) }

// act does what was decided.
func (x *exchange) act(ctx context.Context, record Record, v verdict, err error) {
	switch v {
	case run:
		x.run(ctx, record)
	case recoverFirst:
		x.recoverThenRun(ctx, record)
	case replay:
		x.replay(ctx, record)
	case reused:
		x.count(ctx, x.telemetry.mismatched, x.cfg.ReusedStatus)
		p := x.problem(ProblemKeyReused)
		p.Status = x.cfg.ReusedStatus
		x.answer(p)
	case inProgress:
		x.answerInProgress(ctx)
	case outcomeLost:
		x.count(ctx, x.telemetry.unknown, 0)
		p := x.problem(ProblemOutcomeUnknown)
		x.withState(&p)
		x.answer(p)
	case notStored:
		p := x.problem(ProblemNotStored)
		if record.Location != "" {
			p.Header.Set("Location", record.Location)
		}
		x.answer(p)
	case expired:
		x.refuse(ProblemKeyExpired)
	case tooMany:
		x.refuse(ProblemTooManyKeys)
	case storeFailed:
		if x.cfg.FailOpen && !x.transactional {
			x.logDown(ctx, err)
			x.next.ServeHTTP(x.w, x.request(ctx))
			return
		}
		x.storeDown(ctx, err)
	}
}

func (x *exchange) withState(p *Problem) {
	if x.cfg.StatusPath != "" {
		p.State = x.cfg.StatusPath + statusToken(x.claim.ID)
	}
}

func (x *exchange) answerInProgress(ctx context.Context) {
	p := x.problem(ProblemInProgress)
	x.withState(&p)
	switch x.cfg.InProgress {
	case TooEarly:
		p.Status = http.StatusTooEarly
	case TooManyRequests:
		p.Status = http.StatusTooManyRequests
	case Accepted:
		p.Status = http.StatusAccepted
		p.Header.Set("Location", p.State)
	case Conflict, Wait:
	}
	x.count(ctx, x.telemetry.inProgress, p.Status)
	x.answer(p)
}

// storeDown refuses, also where the handler has run.
func (x *exchange) storeDown(ctx context.Context, err error) {
	x.logDown(ctx, err)
	x.refuse(ProblemStoreUnavailable)
}

func (x *exchange) logDown(ctx context.Context, err error) {
	x.cfg.Logger.LogAttrs(ctx, slog.LevelError, "idempotency store unavailable", x.keyHash(),
		slog.String("endpoint", x.claim.Endpoint), slog.Any("error", err))
}

// replay sends the stored response.
func (x *exchange) replay(ctx context.Context, record Record) {
	res, err := x.decode(ctx, record)
	if err != nil {
		x.cfg.Logger.LogAttrs(ctx, slog.LevelError, "stored response not readable", x.keyHash(), slog.Any("error", err))
		x.refuse(ProblemStoreUnavailable)
		return
	}
	x.count(ctx, x.telemetry.replayed, res.Status)
	x.log(ctx, "cached response returned", slog.Int("status", res.Status))
	if err := res.writeTo(x.w); err != nil {
		x.log(ctx, "replay not sent", slog.Any("error", err))
	}
}

func (e *Engine) decode(ctx context.Context, record Record) (*response, error) {
	plain, err := e.codec.decode(record.ID, record.Response)
	if err != nil {
		return nil, err
	}
	res, err := unmarshalResponse(plain)
	if err != nil {
		return nil, err
	}
	if res.Pointer && e.cfg.Resolve != nil {
		if res.body, err = e.cfg.Resolve(ctx, record); err != nil {
			return nil, fmt.Errorf("resolve: %w", err)
		}
	}
	return res, nil
}

// completion encodes what is to be stored of a response.
func (x *exchange) completion(res *response, streamed bool) (Completion, error) {
	c := Completion{State: Completed, Status: res.Status, ResourceID: printable(x.state.resource(), maxKey), Refuse: x.cfg.RefuseExpired}
	for _, e := range res.Header {
		if e.Name == "Location" && len(e.Values) > 0 {
			c.Location = printable(e.Values[0], 2048)
		}
	}
	if c.Retention = x.cfg.Retention; x.cfg.RetentionFor != nil {
		if d := x.cfg.RetentionFor(x.r, res.Status); d > 0 {
			c.Retention = d
		}
	}
	if res.overflow && !x.cfg.Pointer || streamed || !x.cfg.Storable(res.Status) {
		c.State = NotReplayable
		return c, nil
	}
	stored := *res
	if x.cfg.Pointer {
		stored.body, stored.Pointer = nil, true
		stored.Header = slices.DeleteFunc(slices.Clone(res.Header), func(e headerEntry) bool { return e.Name == "Content-Type" && x.cfg.Resolve == nil })
	}
	plain, err := stored.marshal()
	if err != nil {
		return c, err
	}
	if c.Response, err = x.codec.encode(x.claim.ID, plain); err != nil {
		return c, err
	}
	c.Large = len(c.Response) > x.cfg.LargeAbove && c.Refuse == 0
	return c, nil
}

// request returns the request as the handler gets it, its body from the start.
func (x *exchange) request(ctx context.Context) *http.Request {
	r := x.r.WithContext(ctx)
	r.Header = x.r.Header.Clone()
	if x.body != nil {
		r.Body = io.NopCloser(bytes.NewReader(x.body))
	}
	return r
}
