package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

// Effects is where a [Probe] records its effects. With a transactional engine Add and
// Publish write in the transaction that they find in ctx, otherwise at once.
type Effects interface {
	Add(ctx context.Context, name string) error
	Publish(ctx context.Context, name string) error
	Count(ctx context.Context, name string) (Counts, error)
}

// Probe is the service that the suite tests. Its operations, with any path behind /probe/,
// go through the engine; the headers X-Tenant and X-User are the scope. Use it for tests
// only: every client that reaches it can make it do anything that a [Plan] can express.
type Probe struct {
	effects      Effects
	capabilities Capabilities
	mux          *http.ServeMux

	mu       sync.Mutex
	holds    map[string]chan struct{}
	released map[string]bool
	held     map[string]int
}

// Scope is the Config.Scope that an engine of a Probe needs.
func Scope(r *http.Request) (idempotency.Scope, error) {
	return idempotency.Scope{Tenant: cmp.Or(r.Header.Get("X-Tenant"), "public"), Principal: r.Header.Get("X-User"), Route: "/probe"}, nil
}

// NewProbe returns a service on an engine, whose Config.Scope must be [Scope] and whose
// other settings are described by capabilities.
func NewProbe(engine *idempotency.Engine, effects Effects, capabilities Capabilities) *Probe {
	p := &Probe{
		effects: effects, capabilities: capabilities, mux: http.NewServeMux(),
		holds: map[string]chan struct{}{}, released: map[string]bool{}, held: map[string]int{},
	}
	middleware := engine.Middleware
	if capabilities.Transactional {
		middleware = engine.TxMiddleware
	}
	p.mux.Handle("/probe/", outer(middleware(http.HandlerFunc(p.serve))))
	p.mux.HandleFunc("GET /capabilities", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, p.capabilities) })
	p.mux.HandleFunc("GET /effects/{name}", p.count)
	p.mux.HandleFunc("GET /held/{name}", func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		writeJSON(w, p.held[r.PathValue("name")])
	})
	p.mux.HandleFunc("POST /release/{name}", func(_ http.ResponseWriter, r *http.Request) { p.release(r.PathValue("name")) })
	p.mux.Handle("GET /status/", engine.StatusHandler())
	return p
}

// ServeHTTP implements http.Handler.
func (p *Probe) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.mux.ServeHTTP(w, r) }

// outer is a middleware like those of applications: it sets headers that the handler's
// headers must not duplicate.
func outer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://shop.example")
		w.Header().Set("Vary", "Origin")
		next.ServeHTTP(w, r)
	})
}

func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) // a client that is gone needs no answer
}

func (p *Probe) count(w http.ResponseWriter, r *http.Request) {
	counts, err := p.effects.Count(r.Context(), r.PathValue("name"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, counts)
}

func (p *Probe) serve(w http.ResponseWriter, r *http.Request) {
	var plan Plan
	if err := json.Unmarshal([]byte(r.Header.Get("Probe-Plan")), &plan); err != nil && r.Header.Get("Probe-Plan") != "" {
		http.Error(w, "Probe-Plan: "+err.Error(), http.StatusBadRequest)
		return
	}
	if !plan.SkipBody {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	ctx := r.Context()
	if plan.IgnoreContext {
		ctx = context.WithoutCancel(ctx)
	}
	if err := p.act(ctx, plan); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if plan.Panic {
		panic(http.ErrAbortHandler)
	}
	answer(w, plan)
}

// act performs the effects of a plan.
func (p *Probe) act(ctx context.Context, plan Plan) error {
	for range plan.Effects {
		if err := p.effects.Add(ctx, plan.Name); err != nil {
			return fmt.Errorf("add effect: %w", err)
		}
	}
	for range plan.Messages {
		if err := p.effects.Publish(ctx, plan.Name); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
	if plan.NoEffect {
		idempotency.NoEffect(ctx)
	}
	if plan.EndTx {
		tx, ok := idempotency.TxFromContext(ctx)
		if !ok {
			return errors.New("no transaction")
		}
		if _, err := tx.ExecContext(ctx, "commit"); !errors.Is(err, oncemill.ErrTxOwned) {
			return fmt.Errorf("the commit was not refused: %w", err)
		}
	}
	if plan.Hold {
		return p.hold(ctx, plan)
	}
	return nil
}

// holdLimit keeps a suite that dies from holding a handler forever.
const holdLimit = time.Minute

func (p *Probe) hold(ctx context.Context, plan Plan) error {
	p.mu.Lock()
	if p.released[plan.Name] {
		p.mu.Unlock()
		return nil
	}
	if p.holds[plan.Name] == nil {
		p.holds[plan.Name] = make(chan struct{})
	}
	hold := p.holds[plan.Name]
	p.held[plan.Name]++
	p.mu.Unlock()
	limit := time.NewTimer(holdLimit)
	defer limit.Stop()
	select {
	case <-hold:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-limit.C:
		return errors.New("nobody released it")
	}
}

func (p *Probe) release(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.released[name] = true
	if hold := p.holds[name]; hold != nil {
		close(hold)
		delete(p.holds, name)
	}
}

func answer(w http.ResponseWriter, plan Plan) {
	if plan.EarlyHints {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
	}
	for name, values := range plan.Header {
		w.Header()[http.CanonicalHeaderKey(name)] = slices.Clone(values)
	}
	for name, values := range plan.Add {
		for _, value := range values {
			w.Header().Add(name, value)
		}
	}
	for name := range plan.Trailer {
		w.Header().Add("Trailer", name)
	}
	status := plan.Status
	if status == 0 {
		status = http.StatusCreated
	}
	w.WriteHeader(status)
	body := plan.Body
	if plan.Size > 0 {
		body = make([]byte, plan.Size)
	}
	for chunk := range slices.Chunk(body, 32<<10) {
		if _, err := w.Write(chunk); err != nil {
			return
		}
		if plan.Flush {
			_ = http.NewResponseController(w).Flush() // refused where responses are recorded
		}
	}
	for name, value := range plan.Trailer {
		w.Header().Set(name, value)
	}
}

// MemoryEffects are [Effects] in the memory of one process, without a database.
type MemoryEffects struct {
	mu     sync.Mutex
	counts map[string]Counts
}

// Add implements Effects.
func (m *MemoryEffects) Add(_ context.Context, name string) error {
	m.change(name, Counts{Effects: 1})
	return nil
}

// Publish implements Effects.
func (m *MemoryEffects) Publish(_ context.Context, name string) error {
	m.change(name, Counts{Messages: 1})
	return nil
}

func (m *MemoryEffects) change(name string, by Counts) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.counts == nil {
		m.counts = map[string]Counts{}
	}
	c := m.counts[name]
	m.counts[name] = Counts{c.Effects + by.Effects, c.Messages + by.Messages}
}

// Count implements Effects.
func (m *MemoryEffects) Count(_ context.Context, name string) (Counts, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.counts[name], nil
}
