package shop

import (
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/outbox"
)

// maxBody leaves room for a note whose every byte is escaped.
const maxBody = 8 * MaxNote

// Handler is the shop's HTTP API:
//
//	POST /orders   201 taken, 200 taken before, 400 refused, 5xx repeat the request
//	GET  /stock    what is left
//
// A POST that carries an Idempotency-Key runs in a transaction of the engine: the
// order, its message and the answer are one commit, and whoever repeats the
// request, wherever, gets that answer. Without a key the order's id alone keeps it
// from being taken twice.
func (s *Shop) Handler(engine *idempotency.Engine, logger *slog.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /orders", engine.TxMiddleware(s.take(logger)))
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

// NewEngine returns the engine of the shop's API. tables says where oncemill's
// tables are.
func NewEngine(db *sql.DB, box *outbox.Outbox, tables oncemill.Config, logger *slog.Logger) (*idempotency.Engine, error) {
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: tables})
	if err != nil {
		return nil, err
	}
	return idempotency.New(store, idempotency.Config{
		Scope:    idempotency.SingleTenant(), // a shop with accounts names tenant and user
		Timeout:  time.Second,                // for an impatient audience, as the lease
		OnCommit: box.Wake,
		Logger:   logger,
		Keys:     idempotency.KeyConfig{Optional: true},
		Requests: idempotency.RequestConfig{Body: idempotency.BodyJSON},
		Failures: idempotency.FailureConfig{Lease: 2 * time.Second},
	})
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
