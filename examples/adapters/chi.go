package adapters

import (
	"context"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/oncemill/oncemill/idempotency"
)

// Chi returns a chi middleware, for Use and With. chi keeps its routing state in the request's
// context and changes it on the way to the handler. So each attempt gets a copy; without it
// the second attempt would be answered with 404. An outer middleware does not see the
// patterns of routes behind this one.
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
