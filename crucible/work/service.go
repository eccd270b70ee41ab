package work

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
)

// RoleService is the role of processes that take transfers by HTTP.
const RoleService = "service"

const insertAnswer = `insert into answered (key, nonce) values ($1, $2)`

// Order is the body of a request.
type Order struct {
	Seed uint64 `json:"seed"` // of all that chance decides about the transfer
}

// Receipt is the answer. Two runs of a handler never give the same.
type Receipt struct {
	Nonce string `json:"nonce"`
}

func (w *worker) configureService(cfg *mill.Config) {
	cfg.Outbox = &outbox.Config{CommitTimeout: 3 * time.Second}
	cfg.Idempotency = &idempotency.Config{
		Scope: idempotency.SingleTenant(), Timeout: 3 * time.Second,
		Requests: idempotency.RequestConfig{Body: idempotency.BodyJSON},
		Failures: idempotency.FailureConfig{Lease: 4 * time.Second},
	}
	if w.named() {
		cfg.Idempotency.Failures.UniqueName = w.Name
	}
}

// server returns the service, which listens where the job says.
func (w *worker) server(m *mill.Mill) func(context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("POST /transfers", m.Idempotency().TxMiddleware(w.take(m.Outbox())))
	return m.Serve(&http.Server{Addr: w.Listen, Handler: mux, ReadHeaderTimeout: 10 * time.Second})
}

// take does the transfer of a request, and answers with what no other run would answer.
func (w *worker) take(box *outbox.Outbox) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		tx, ok := idempotency.TxFromContext(r.Context())
		var order Order
		if err := json.NewDecoder(r.Body).Decode(&order); err != nil || !ok {
			http.Error(rw, "not an order", http.StatusBadRequest)
			return
		}
		t := newTransfer(rand.New(rand.NewPCG(order.Seed, 1)), w.Accounts)
		t.messages, t.rollback, t.panics = t.messages[:1], false, false
		t.messages[0].id = watermill.NewUUID()
		receipt := Receipt{Nonce: t.id}
		_, err := tx.ExecContext(r.Context(), insertAnswer, r.Header.Get("Idempotency-Key"), receipt.Nonce)
		if err == nil {
			err = t.body(r.Context(), box, tx)
		}
		if err != nil {
			http.Error(rw, "please try again", http.StatusServiceUnavailable)
			return
		}
		rw.Header().Set("Content-Type", "application/json")
		rw.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(rw).Encode(receipt) // held back until the commit, so it cannot fail
	})
}
