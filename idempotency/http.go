package idempotency

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// TxMiddleware runs handlers in a transaction that they get with [TxFromContext]. Their
// writes there, the messages they publish to the outbox, and their response commit
// together; until then the response is held back. TxMiddleware needs a [SQLStore]; without
// one it panics with [ErrNotTransactional] when it is called.
//
// A response below 400 commits, but for a 202 that passes on a downstream's problem, see
// Config.Responses.Storable. Any other response, a panic or a timeout rolls back; such
// responses are also stored if Config.Responses.Storable allows it. On PostgreSQL a
// response is not stored if a statement had failed before it, and with it the
// transaction. After a serialization failure the handler runs again, so it must have no
// effects other than those in the transaction. Each attempt has a request of its own, but
// shares the values of its context. A router inside the middleware that keeps its state
// there, as chi does, needs a copy of it for each attempt (see examples/adapters);
// otherwise it finds its routes only the first time.
//
// With Config.Transactions.GroupSize, requests that arrive at the same time share a
// transaction, and the cost of its commit. They have their own keys, handles and
// outcomes. The handlers of a group run one after the other, for a quarter of a second in
// all. If a handler fails in any way, or answers with an error after it has queried the
// database (on SQLite: with any error), the group is rolled back. That request runs again
// alone, and the others again without it. If a handler takes longer than a second, its
// context ends, and it and all others of its group run again alone. A handler that
// changes a setting (set local, a role, a search path), which would affect the others,
// also runs again alone. So do not use groups for handlers that take long, often refuse,
// or change a setting each time. Functions that change settings, and savepoints of the
// same name, do affect the others.
//
// Groups become smaller, down to one request, when they take too long or when their locks
// block others: after a deadlock, a serialization failure, or a wait for a lock of 100 ms.
// They grow again slowly. Groups pay off where dozens of requests arrive at once.
//
// A request that a middleware of this package already runs passes through another one.
func (e *Engine) TxMiddleware(next http.Handler) http.Handler {
	if _, ok := e.store.(*SQLStore); !ok {
		panic(ErrNotTransactional)
	}
	return e.middleware(next, true)
}

// Middleware runs handlers whose effects are elsewhere, and stores their answers, however
// late. The outcome is unknown if the process dies between the effect and the storing, or
// if the handler panics, answers with a 5xx that Config.Responses.Storable does not accept,
// or takes longer than Config.Timeout, unless the handler has called [NoEffect]; see
// Config.Failures.Crashed and Config.Failures.Failed.
// An error from 400 to 499 in time means that there was no effect.
//
// A request that a middleware of this package already runs passes through another one.
func (e *Engine) Middleware(next http.Handler) http.Handler { return e.middleware(next, false) }

func (e *Engine) middleware(next http.Handler, transactional bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(e.cfg.Keys.Methods, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		x := &exchange{intent: e.newIntent(transactional), runner: e.runner, w: w, r: r, next: next}
		x.detached, x.shares = true, true
		if outer, ok := r.Context().Value(runKey{}).(*current); ok && outer.request {
			x.inside(r.Context(), outer)
			return
		}
		x.serve(r.Context())
	})
}

// inside serves a request that another middleware of this package runs, and which already
// has its key.
func (x *exchange) inside(ctx context.Context, outer *current) {
	if x.transactional && !outer.transactional {
		x.cfg.Logger.ErrorContext(ctx, "idempotency middleware applied twice", "problem", "TxMiddleware is inside Middleware; remove one")
		x.refuse(ProblemInternal)
		return
	}
	x.next.ServeHTTP(x.w, x.r)
}

func (x *exchange) serve(ctx context.Context) {
	received := time.Now()
	key, err := x.key()
	if err != nil {
		x.refuseKey(err)
		return
	}
	if key == "" {
		x.withoutKey(ctx)
		return
	}
	if !x.identify(ctx, key) {
		return
	}
	ctx = x.beginSpan(ctx, received)
	defer x.endSpan(ctx) // also if the handler has panicked
	x.log(ctx, slog.LevelDebug, "idempotency key received")
	x.count(ctx, x.telemetry.received, 0)
	record, v, err := x.decide(ctx)
	x.act(ctx, record, v, err)
}

// key returns the key, or "" if none is required. An error is a [*KeyError], or errNoKey.
func (x *exchange) key() (key string, err error) {
	values := x.r.Header.Values(x.cfg.Keys.Header)
	switch {
	case len(values) == 0 && x.cfg.Keys.Optional:
		return "", nil
	case len(values) == 0:
		return "", errNoKey
	case len(values) > 1:
		return "", &KeyError{Problem: "came in more than one header"}
	}
	if key, err = ParseKey(values[0]); err != nil {
		return "", err
	}
	if x.cfg.Keys.TrimSpace {
		if key = strings.TrimSpace(key); key == "" {
			return "", &KeyError{Problem: "is empty"}
		}
	}
	if x.cfg.Keys.StrictUUID {
		if !isUUID(key) {
			return "", &KeyError{Problem: "is not a UUID"}
		}
		key = strings.ToLower(key)
	}
	return key, nil
}

var errNoKey = errors.New("no key")

// refuseKey answers a request without a usable key.
func (x *exchange) refuseKey(err error) {
	kind, reason := ProblemKeyMissing, "The header "+x.cfg.Keys.Header+" is missing."
	if bad := (*KeyError)(nil); errors.As(err, &bad) {
		kind, reason = ProblemKeyInvalid, "The key "+bad.Problem+"."
	}
	p := x.problem(kind)
	p.Detail = reason + " " + p.Detail
	x.answer(p)
}

// identify reads the request and makes its claim. False means that it has been answered.
func (x *exchange) identify(ctx context.Context, key string) bool {
	scope, err := x.scopeOf(x.r)
	if none := (*ScopeError)(nil); errors.As(err, &none) {
		p := x.problem(ProblemScopeMissing)
		p.Status, p.Detail = cmp.Or(none.Status, p.Status), cmp.Or(none.Detail, p.Detail)
		x.answer(p)
		return false
	}
	if err != nil {
		x.logScope(ctx, err)
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
	x.claim.Fingerprint = requestFingerprint(x.hash, x.r, scope.Route, path, body, x.cfg.Requests.Headers)
	x.claim.ID = hashID(x.hash, "oncemill idempotency key", scope.Tenant, scope.Principal, x.r.Method, scope.Route, key)
	x.claim.Caller = hashCaller(x.hash, scope)
	x.scope = scope
	if x.codec.ciphers == nil {
		x.claim.CorrelationID = printable(x.r.Header.Get(x.cfg.Telemetry.CorrelationHeader), maxKey)
	}
	if x.cfg.Telemetry.TenantAttribute {
		x.tenant = scope.Tenant
	}
	return true
}

// compared returns the part of the body that is compared; false means that the request has
// been answered.
func (x *exchange) compared(ctx context.Context) (content, bool) {
	c, err := contentOf(x.r, x.body, x.cfg.Requests.Body)
	switch {
	case err == nil:
		return c, true
	case errors.Is(err, errBodyTaken):
		x.logBodyTaken(ctx)
		x.refuse(ProblemInternal)
	default:
		x.refuse(ProblemUnsupportedBody)
	}
	return content{}, false
}

// requestPath returns the path that the client requested, whatever prefix a router
// removed.
func requestPath(r *http.Request) string {
	if asked, err := url.ParseRequestURI(r.RequestURI); err == nil {
		return asked.EscapedPath()
	}
	return r.URL.EscapedPath() // not from a server
}
