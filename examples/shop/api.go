package shop

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
)

// maxBody leaves room for a note whose every byte is escaped.
const maxBody = 8 * MaxNote

// Handler is the shop's HTTP API:
//
//	POST /orders   201 taken, 200 taken before, 400 refused, 5xx repeat the request
//	GET  /stock    what is left
func (s *Shop) Handler(logger *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", func(w http.ResponseWriter, r *http.Request) {
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
			// Whether a commit whose answer was lost happened is unknown here
			// (outbox.ErrCommitUnknown); the repeated request finds out.
			logger.ErrorContext(r.Context(), "order not taken", "order_id", order.ID, "error", err)
			w.Header().Set("Retry-After", "1")
			http.Error(w, "not taken; repeat the request", http.StatusServiceUnavailable)
		case placed:
			answer(w, http.StatusCreated, map[string]any{"order": order.ID, "status": "taken"})
		default:
			answer(w, http.StatusOK, map[string]any{"order": order.ID, "status": "taken before"})
		}
	})
	mux.HandleFunc("GET /stock", func(w http.ResponseWriter, r *http.Request) {
		products, err := s.Stock(r.Context())
		if err != nil {
			logger.ErrorContext(r.Context(), "stock not read", "error", err)
			http.Error(w, "stock cannot be read", http.StatusServiceUnavailable)
			return
		}
		answer(w, http.StatusOK, products)
	})
	return mux
}

func answer(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // a client that has gone needs no answer
}
