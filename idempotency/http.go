package idempotency

import (
	"context"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/trace"
)

// TxMiddleware runs handlers in a transaction that they find with
// [TxFromContext]: what they write there, what they publish to the outbox, and
// their response, which is kept back until then, commit together. It needs a
// [SQLStore] and panics, when it is called, with [ErrNotTransactional] without
// one.
//
// A response below 400 commits. Any other one, a panic, a timeout roll back, and
// are stored too if Config.Storable says so; what was answered after a statement had
// failed on PostgreSQL, and with it the transaction, is not. A serialization failure runs the
// handler again, so it must have no other effects than those in the transaction. Each
// attempt has a request of its own, but shares the values of its context: a router behind
// the middleware that keeps its state there, as chi does, needs a copy of it for each
// attempt (see examples/adapters), or finds its routes the first time only.
//
// With Config.GroupSize requests that come at the same time share a transaction, and
// the cost of its commit. They have their own keys, handles and outcomes. Handlers of a
// group run one after the other, for a quarter of a second in all; if one fails in any
// way, or answers with an error after it has asked the database for something (on SQLite:
// with any error), the group is rolled back, that one runs again alone, and the others again without it. One that
// takes longer than a second has its context ended and runs again alone, as do all of its
// group, and so does one that changes a setting (set local, a role, a search path), which
// would reach the others. So a handler does not belong here that takes long, that often
// refuses, or that does so each time. Functions that change settings, and savepoints of the
// same name, do reach the others. Groups become smaller, down to one request, when they
// take too long, and when their locks are in the way of others: after a deadlock, a
// serialization failure, or a wait for a lock of 100 ms; they grow again slowly. It pays
// where dozens of requests come at once.
//
// A request that a middleware of this package runs already passes through another one.
func (e *Engine) TxMiddleware(next http.Handler) http.Handler {
	if _, ok := e.store.(*SQLStore); !ok {
		panic(ErrNotTransactional)
	}
	return e.middleware(next, true)
}

// Middleware runs handlers whose effects are elsewhere, and stores what they
// answered, however late. If the process dies between the effect and the storing, or the
// handler panics, answers with 5xx or takes longer than Config.Timeout, whether there
// was an effect is unknown, unless the handler has called [NoEffect]; see Config.Crashed
// and Config.Failed. An error from 400 to 499 in time says that there was none.
//
// A request that a middleware of this package runs already passes through another one.
func (e *Engine) Middleware(next http.Handler) http.Handler { return e.middleware(next, false) }

func (e *Engine) middleware(next http.Handler, transactional bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(e.cfg.Methods, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		x := &exchange{intent: e.newIntent(transactional), w: w, r: r, next: next}
		x.detached, x.shares = true, true
		if outer, ok := r.Context().Value(runKey{}).(*current); ok && outer.request {
			x.inside(r.Context(), outer)
			return
		}
		x.serve(r.Context())
	})
}

// exchange is one request and its answer.
type exchange struct {
	intent
	w    http.ResponseWriter
	r    *http.Request
	next http.Handler
	body []byte
}

// inside serves a request that another middleware of ours runs: it has the key already.
func (x *exchange) inside(ctx context.Context, outer *current) {
	if x.transactional && !outer.transactional {
		x.cfg.Logger.ErrorContext(ctx, "idempotency middleware applied twice", "problem", "TxMiddleware stands behind Middleware; remove one")
		x.refuse(ProblemInternal)
		return
	}
	x.next.ServeHTTP(x.w, x.r)
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
	x.log(ctx, slog.LevelDebug, "idempotency key received")
	x.count(ctx, x.telemetry.received, 0)
	record, v, err := x.decide(ctx)
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
	scope, err := x.cfg.Scope(x.r)
	if err != nil {
		x.cfg.Logger.ErrorContext(ctx, "idempotency scope failed", "error", err)
		x.refuse(ProblemInternal)
		return false
	}
	path := requestPath(x.r)
	x.claim.Endpoint = endpointOf(x.r.Method, scope.Route, x.r.Pattern)
	if scope.Route == "" {
		if scope.Route = x.r.Pattern; scope.Route == "" {
			scope.Route = path
		}
	}
	if !x.readBody() {
		return false
	}
	x.begin() // whatever time the client took to send is its own
	body, ok := x.compared(ctx)
	if !ok {
		return false
	}
	x.claim.Fingerprint = x.fingerprint(scope.Route, path, body)
	x.claim.ID = hashID(x.hash, "oncemill idempotency key", scope.Tenant, scope.Principal, x.r.Method, scope.Route, key)
	x.claim.Caller = hashCaller(x.hash, scope)
	if x.codec.ciphers == nil {
		x.claim.CorrelationID = printable(x.r.Header.Get(x.cfg.CorrelationHeader), maxKey)
	}
	if span := trace.SpanContextFromContext(ctx); span.IsValid() {
		x.claim.TraceID = span.TraceID().String()
	}
	if x.cfg.TenantAttribute {
		x.tenant = scope.Tenant
	}
	return true
}

// requestPath returns the path that the client asked for, whatever a router has cut
// off on the way.
func requestPath(r *http.Request) string {
	if asked, err := url.ParseRequestURI(r.RequestURI); err == nil {
		return asked.EscapedPath()
	}
	return r.URL.EscapedPath() // not from a server
}

func hashCaller(hash hasher, scope Scope) (c Caller) {
	id := hashID(hash, "oncemill idempotency caller", scope.Tenant, scope.Principal)
	copy(c[:], id[:])
	return c
}

// endpointOf names the operation for operators. A pattern of http.ServeMux holds
// the method already. A path is none: there are too many, and some hold secrets.
func endpointOf(method, route, pattern string) string {
	if route == "" {
		if route = pattern; route == "" {
			route = "unmatched"
		}
	}
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
