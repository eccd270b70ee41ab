package conformance_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// attempt is a run of a handler. What it does counts when it commits.
type attempt struct {
	*process
	recorder
	r    *http.Request
	ctx  context.Context //nolint:containedctx // of the attempt
	body []byte

	name   string // under which effects are counted
	counts conformance.Counts
	placed string // the id of an order

	panicked bool

	given, ended, stale bool // given up before it ended; guarded by the service's lock
}

func (a *attempt) run(next func(*attempt)) {
	defer func() { a.panicked = recover() != nil }()
	next(a)
}

// commit makes the effects count. The caller holds the service's lock.
func (a *attempt) commit() {
	c := a.effects[a.name]
	a.effects[a.name] = conformance.Counts{Effects: c.Effects + a.counts.Effects, Messages: c.Messages + a.counts.Messages}
	if a.placed != "" {
		a.service.placed[a.placed]++
	}
}

// again commits the effects of a request that is replayed.
func (p *process) again(r *http.Request, replayed *answer) {
	a := &attempt{process: p, r: r}
	var plan conformance.Plan
	if json.Unmarshal([]byte(r.Header.Get("Probe-Plan")), &plan) == nil {
		a.name, a.counts = plan.Name, conformance.Counts{Effects: plan.Effects, Messages: plan.Messages}
	} else {
		a.placed = strings.TrimPrefix(replayed.header.Get("Location"), "/orders/")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	a.commit()
}

// follow does what a plan says.
func follow(a *attempt) {
	var plan conformance.Plan
	if err := json.Unmarshal([]byte(a.r.Header.Get("Probe-Plan")), &plan); err != nil {
		http.Error(a, err.Error(), http.StatusBadRequest)
		return
	}
	a.name, a.counts = plan.Name, conformance.Counts{Effects: plan.Effects, Messages: plan.Messages}
	if a.bug == hasEffectsAtOnce {
		a.mu.Lock()
		a.commit()
		a.counts = conformance.Counts{}
		a.mu.Unlock()
	}
	if plan.EndTx {
		http.Error(a, "transactions are not the handler's to end", http.StatusInternalServerError)
		return
	}
	if plan.Hold {
		ctx := a.ctx
		if plan.IgnoreContext {
			ctx = context.WithoutCancel(ctx)
		}
		if err := a.wait(ctx, plan.Name); err != nil {
			http.Error(a, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	if plan.Panic {
		panic(http.ErrAbortHandler)
	}
	if plan.EarlyHints {
		a.Header().Set("Link", "</style.css>; rel=preload")
		a.WriteHeader(http.StatusEarlyHints)
		a.Header().Del("Link")
	}
	for name, values := range plan.Header {
		a.Header()[http.CanonicalHeaderKey(name)] = values
	}
	for name, values := range plan.Add {
		for _, value := range values {
			a.Header().Add(name, value)
		}
	}
	for name := range plan.Trailer {
		a.Header().Add("Trailer", name)
	}
	if plan.Status == 0 {
		plan.Status = http.StatusCreated
	}
	a.WriteHeader(plan.Status)
	if plan.Size > 0 {
		plan.Body = make([]byte, plan.Size)
	}
	_, _ = a.Write(plan.Body) // into memory
	for name, value := range plan.Trailer {
		a.Header().Set(name, value)
	}
}

// order places an order.
func order(a *attempt) {
	var o struct {
		ID string `json:"id"`
	}
	if err := json.Unmarshal(a.body, &o); err != nil || o.ID == "" {
		http.Error(a, "an order has an id", http.StatusBadRequest)
		return
	}
	testserver.Pause(a.ctx, time.Millisecond) // as a database takes to answer
	a.placed = o.ID
	a.Header().Set("Location", "/orders/"+o.ID)
	a.Header().Set("ETag", `"`+o.ID+`"`)
	a.Header().Set("Cache-Control", "private")
	a.Header().Set("Content-Type", "application/json")
	a.WriteHeader(http.StatusCreated)
	writeJSON(a, map[string]string{"order": o.ID})
}
