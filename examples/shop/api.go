package shop

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// maxBody leaves room for a note whose every byte is escaped.
const maxBody = 8 * MaxNote

// Handler is the shop's HTTP API:
//
//	POST /orders   201 accepted, 200 accepted before, 400 refused, 5xx repeat the request
//
// A request with an Idempotency-Key runs in a transaction of the engine: the order, its
// message and the answer commit together, and every repeated request gets that answer.
// Without a key, only the order's id prevents a second order.
func (s *Shop) Handler(engine *idempotency.Engine, logger *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /orders", engine.TxMiddleware(s.take(logger)))
	return mux
}

// Idempotency returns the settings of the API's keys, with timeouts short enough for a demo.
func Idempotency() *idempotency.Config {
	return &idempotency.Config{
		Scope:    idempotency.SingleTenant(), // a shop with accounts names tenant and user
		Timeout:  time.Second,
		Keys:     idempotency.KeyConfig{Optional: true},
		Requests: idempotency.RequestConfig{Body: idempotency.BodyJSON},
		Failures: idempotency.FailureConfig{Lease: 2 * time.Second},
	}
}

// take takes orders.
func (s *Shop) take(logger *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var order Order
		body := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
		body.DisallowUnknownFields()
		if err := body.Decode(&order); err != nil {
			http.Error(w, "the body must be one order as JSON: "+err.Error(), http.StatusBadRequest)
			return
		}
		placed, err := s.Place(r.Context(), order)
		switch {
		case errors.Is(err, ErrOrder):
			http.Error(w, err.Error(), http.StatusBadRequest)
		case err != nil:
			// Nothing is stored of it: the repeated request runs again.
			logger.ErrorContext(r.Context(), "order not taken", "order_id", order.ID, "error", err)
			w.Header().Set("Retry-After", "1")
			http.Error(w, "not taken; repeat the request", http.StatusServiceUnavailable)
		case placed:
			idempotency.SetResourceID(r.Context(), order.ID)
			answer(w, http.StatusCreated, map[string]any{"order": order.ID, "status": "taken"})
		default:
			answer(w, http.StatusOK, map[string]any{"order": order.ID, "status": "taken before"})
		}
	})
}

func answer(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // a client that has gone needs no answer
}
