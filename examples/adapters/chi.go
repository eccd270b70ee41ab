package adapters

import (
	"context"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/oncemill/oncemill/idempotency"
)

// Chi makes a chi middleware of the engine, for Use and With. chi keeps its place among
// its routes in the request's context and changes it on the way to the handler, so each
// attempt gets a copy: without it the second one would be answered with 404. A middleware
// outside does not see the pattern of routes behind this one.
func Chi(engine *idempotency.Engine) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if route := chi.RouteContext(r.Context()); route != nil {
				r = r.WithContext(context.WithValue(r.Context(), chi.RouteCtxKey, route.Clone()))
			}
			next.ServeHTTP(w, r)
		}))
	}
}
