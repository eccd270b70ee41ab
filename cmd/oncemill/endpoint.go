package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/status"
)

// endpoint is what a worker serves for orchestrators and people:
//
//	/healthz  200 while the process answers; restarting it helps against nothing else
//	/readyz   200 while the worker can deliver and messages are not late, 503 otherwise
//	/status   the status of the database as JSON, about a second old
//	/metrics  the metrics of the process for Prometheus, unless OpenTelemetry is disabled
//	/debug/pprof/  profiles of the process, only with --pprof
//
// Clients are not trusted: there are at most endpointConns connections, each with time limits,
// and however many ask, the database and the metrics are read about once a second.
//
// It has no authentication, so why something failed is in the log only.
type endpoint struct {
	ready func() error
	read  func(context.Context) (*status.Status, error) // ends with its context
	log   *slog.Logger

	late    time.Duration // oldest message for /readyz; 0: any
	metrics http.Handler  // nil: none
	pprof   bool

	mu     sync.Mutex // guards latest
	latest *reading
}

// reading is one reading of the database, for all who ask meanwhile and within a second.
type reading struct {
	done chan struct{} // closed when what follows is set
	text []byte
	late time.Duration // age of the oldest message in the outbox; negative if it is unknown
	err  error
	fit  time.Time // it is fresh until then
}

const (
	statusAge     = time.Second
	statusTimeout = 15 * time.Second // longer than a Reader takes

	endpointConns   = 64
	endpointTimeout = 20 * time.Second // for an answer
	endpointHeader  = 16 << 10         // bytes
)

func (e *endpoint) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := e.delivers(r.Context()); err != nil {
			e.log.DebugContext(r.Context(), "not ready", "error", err)
			http.Error(w, "not ready; the log says why", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		at := e.reading(r.Context())
		select {
		case <-at.done:
		case <-r.Context().Done():
			return
		}
		if at.err != nil {
			http.Error(w, "the database cannot be read; the log says why", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(at.text) // an error means that the client has gone
	})
	if e.metrics != nil {
		mux.Handle("GET /metrics", e.metrics)
	}
	if e.pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		// Without cmdline, which may hold the password of the database. Handlers extend the
		// time limit to what a request asks for.
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// reading returns a reading that is in progress or fresh, or begins one. It does not end with
// the request: others wait for it.
func (e *endpoint) reading(ctx context.Context) *reading {
	e.mu.Lock()
	defer e.mu.Unlock()
	if at := e.latest; at != nil {
		select {
		case <-at.done:
			if time.Now().Before(at.fit) {
				return at
			}
		default:
			return at
		}
	}
	at := &reading{done: make(chan struct{})}
	e.latest = at
	go func() { // ends with the reading
		defer close(at.done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statusTimeout)
		defer cancel()
		begin := time.Now()
		at.text, at.late, at.err = e.fresh(ctx)
		if at.err != nil {
			e.log.WarnContext(ctx, "the status cannot be read", "error", at.err)
		}
		// A reading that takes long is expensive: it must not be made all the time.
		at.fit = time.Now().Add(max(statusAge, 10*time.Since(begin)))
	}()
	return at
}

func (e *endpoint) fresh(ctx context.Context) (text []byte, late time.Duration, err error) {
	s, err := e.read(ctx)
	if err != nil {
		return nil, 0, err
	}
	late = -1 // a table is locked, say
	if s.Outbox != nil {
		late = time.Duration(s.Outbox.Oldest)
	}
	switch {
	// What was set aside has left the outbox but not the database, and uses up no attempts that
	// would end its wait: it is as late as before. A refused message becomes a dead letter, and
	// must not take all workers out of service meanwhile.
	case late >= 0 && s.Relay != nil:
		late = max(late, time.Duration(s.Relay.OldestSetAside))
	case slices.Contains(s.Silent, "relay"):
		late = -1
	}
	text, err = json.Marshal(described(s))
	return append(text, '\n'), late, err
}

// delivers returns why the worker is not ready, nil if it is.
func (e *endpoint) delivers(ctx context.Context) error {
	if err := e.ready(); err != nil || e.late == 0 {
		return err
	}
	at := e.reading(ctx)
	select {
	case <-at.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	switch {
	case at.err != nil:
		return at.err
	case at.late < 0:
		return errors.New("the backlog cannot be read, so messages may have waited for longer than --ready-lag")
	case at.late > e.late:
		return fmt.Errorf("a message has waited for %v, longer than --ready-lag %v", at.late.Truncate(time.Second), e.late)
	}
	return nil
}

// serve serves until ctx ends. That it cannot does not end the worker.
func (e *endpoint) serve(ctx context.Context, listener net.Listener) {
	server := &http.Server{
		Handler: e.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: endpointTimeout, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: endpointHeader, ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // Serve returns http.ErrServerClosed
	defer stop()
	if err := server.Serve(&boundedListener{Listener: listener, most: endpointConns}); !errors.Is(err, http.ErrServerClosed) {
		e.log.ErrorContext(ctx, "health, status and metrics are no longer served", "error", err)
	}
}

// described is a status with its problems, as the command and the endpoint print it.
func described(s *status.Status) any {
	return struct {
		*status.Status
		Problems []string
	}{s, append([]string{}, s.Problems()...)}
}
