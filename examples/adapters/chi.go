package adapters

import (
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/oncemill/oncemill/idempotency"
)

// Chi puts the engine in front of the routes of a group. chi's middleware is
// net/http's.
func Chi(engine *idempotency.Engine, place http.HandlerFunc) http.Handler {
	router := chi.NewRouter()
	router.Group(func(orders chi.Router) {
		orders.Use(engine.TxMiddleware)
		orders.Post("/orders/{id}/pay", place)
	})
	return router
}
