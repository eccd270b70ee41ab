package conformance_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// process serves a probe and an operation, orders.
type process struct {
	*service
	address string

	life   context.Context //nolint:containedctx // ends with the process
	server *http.Server
	ended  chan struct{} // closed when the server has ended

	frozen   chan struct{} // closed when the process continues; nil if it runs. Guarded by the service's lock
	frozenAt time.Time

	holding  sync.Mutex // guards the next three
	holds    map[string]chan struct{}
	released map[string]bool
	held     map[string]int

	die context.CancelFunc
}

// start runs a process. Its address is one that is free, if address is empty.
func (s *service) start(t *testing.T, address string) *process {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", cmp.Or(address, "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{
		service: s, address: listener.Addr().String(), ended: make(chan struct{}),
		holds: map[string]chan struct{}{}, released: map[string]bool{}, held: map[string]int{},
	}
	p.life, p.die = context.WithCancel(context.WithoutCancel(t.Context()))
	mux := http.NewServeMux()
	mux.HandleFunc("/probe/", p.keyed(false, follow))
	for _, path := range []string{"/orders", "/payments", "/tenants/{tenant}/orders"} {
		mux.HandleFunc(path, p.keyed(s.optional, order))
	}
	mux.HandleFunc("GET /status/{token}", p.serveStatus)
	mux.HandleFunc("GET /capabilities", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, limits) })
	mux.HandleFunc("GET /effects/{name}", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		writeJSON(w, s.effects[r.PathValue("name")])
	})
	mux.HandleFunc("GET /held/{name}", func(w http.ResponseWriter, r *http.Request) {
		p.holding.Lock()
		defer p.holding.Unlock()
		writeJSON(w, p.held[r.PathValue("name")])
	})
	mux.HandleFunc("POST /release/{name}", func(_ http.ResponseWriter, r *http.Request) { p.release(r.PathValue("name")) })
	p.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // it lives for a test
		p.stand()
		mux.ServeHTTP(w, r)
	})}
	go func() {
		defer close(p.ended)
		_ = p.server.Serve(listener) // until kill
	}()
	return p
}

// kill ends the process without a word to its clients and its handlers.
func (p *process) kill() {
	p.mu.Lock()
	p.die()
	if p.bug == losesAnswers {
		maps.DeleteFunc(p.records, func(_ string, r *record) bool { return r.owner == p && r.answer != nil })
	}
	p.mu.Unlock()
	_ = p.server.Close() // it is the listener that has to be closed
	<-p.ended
}

// freeze stops the process: requests wait, and so does what handlers have done.
func (p *process) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen, p.frozenAt = make(chan struct{}), time.Now()
}

func (p *process) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.frozen)
	p.frozen = nil
}

// stand waits while the process is frozen.
func (p *process) stand() {
	p.mu.Lock()
	frozen := p.frozen
	p.mu.Unlock()
	if frozen != nil {
		select {
		case <-frozen:
		case <-p.life.Done():
		}
	}
}

// expire lets all answers expire, purge removes them.
func (s *service) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.records {
		r.expired = r.answer != nil || s.bug == purgesTheRunning
	}
}

func (s *service) purge() {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.records, func(_ string, r *record) bool {
		return r.expired && s.bug != neverExpires || r.answer != nil && s.bug == purgesAll
	})
}

// serveStatus answers for the status URL.
func (p *process) serveStatus(w http.ResponseWriter, r *http.Request) {
	tenant, user := caller(r)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, rec := range p.records {
		if rec.token != r.PathValue("token") || rec.caller != fmt.Sprintf("%q %q", tenant, user) && p.bug != showsAllStates {
			continue
		}
		state := "started"
		if rec.answer != nil || p.bug == showsEndTooEarly {
			state = "completed"
		}
		writeJSON(w, map[string]string{"state": state})
		return
	}
	w.WriteHeader(http.StatusNotFound)
	writeJSON(w, map[string]string{"state": "absent"})
}

func token(id string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(id))) }

func writeJSON(w http.ResponseWriter, value any) {
	_ = json.NewEncoder(w).Encode(value) // a client that is gone needs no answer
}

// wait holds a handler until it is released.
func (p *process) wait(ctx context.Context, name string) error {
	p.holding.Lock()
	if p.released[name] {
		p.holding.Unlock()
		return nil
	}
	hold := p.holds[name]
	if hold == nil {
		hold = make(chan struct{})
		p.holds[name] = hold
	}
	p.held[name]++
	p.holding.Unlock()
	select {
	case <-hold:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.life.Done():
		return p.life.Err()
	}
}

func (p *process) release(name string) {
	p.holding.Lock()
	defer p.holding.Unlock()
	p.released[name] = true
	if hold := p.holds[name]; hold != nil {
		close(hold)
		delete(p.holds, name)
	}
}

// answer is a stored one.
type answer struct {
	status  int
	header  http.Header
	trailer http.Header
	body    []byte
}

// kept returns what is stored of an answer.
func (p *process) kept(a *answer) *answer {
	kept := &answer{a.status, a.header.Clone(), a.trailer.Clone(), bytes.Clone(a.body)}
	drop := map[string]bug{
		"Set-Cookie": replaysCookies, "Date": replaysDates, "Keep-Alive": replaysHops, "Proxy-Authenticate": replaysHops,
	}
	for name, unless := range drop {
		if p.bug != unless {
			kept.header.Del(name)
		}
	}
	switch p.bug {
	case losesStatus:
		kept.status = http.StatusOK
	case losesLocation:
		kept.header.Del("Location")
	case losesETag:
		kept.header.Del("ETag")
	case losesCaching:
		kept.header.Del("Cache-Control")
	case losesSecond:
		for name, values := range kept.header {
			kept.header[name] = values[:1]
		}
	case losesTrailers:
		kept.trailer = nil
		kept.header.Del("Trailer")
	case addsALine:
		kept.body = append(kept.body, '\n')
	case replaysText:
		kept.body = []byte(strings.ToValidUTF8(string(kept.body), "\uFFFD"))
	}
	return kept
}

func (a *answer) send(w http.ResponseWriter) {
	clear(w.Header())
	maps.Copy(w.Header(), a.header.Clone())
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // a client that is gone needs no answer
	maps.Copy(w.Header(), a.trailer.Clone())
}

// replay sends a stored answer.
func (p *process) replay(w http.ResponseWriter, r *http.Request, a *answer) {
	marked := &answer{a.status, a.header.Clone(), a.trailer, a.body}
	if p.bug != marksNothing {
		marked.header.Set("Idempotency-Replayed", "true")
	}
	if p.bug == hasEffectsOnReplay {
		p.again(r, a)
	}
	marked.send(w)
}

// recorder records what a handler answers.
type recorder struct {
	out    http.ResponseWriter // for informational responses
	header http.Header
	sent   http.Header // as they were when the handler wrote the status
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if status < http.StatusOK {
		before := r.out.Header().Clone()
		maps.Copy(r.out.Header(), r.header)
		r.out.WriteHeader(status)
		clear(r.out.Header())
		maps.Copy(r.out.Header(), before)
		return
	}
	if r.status == 0 {
		r.status, r.sent = status, r.header.Clone()
	}
}

func (r *recorder) Write(body []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(body)
}

func (r *recorder) result() *answer {
	r.WriteHeader(http.StatusOK) // a handler that has written nothing
	trailer := http.Header{}
	for _, name := range r.sent.Values("Trailer") {
		trailer[name] = slices.Clone(r.header.Values(name))
	}
	return &answer{r.status, r.sent, trailer, r.body.Bytes()}
}
