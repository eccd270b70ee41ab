package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/oncemill/oncemill/status"
)

// endpoint is what a worker serves for orchestrators and people:
//
//	/healthz  200 while the process answers; restarting it helps against nothing else
//	/readyz   200 while the worker can deliver, 503 with the reason otherwise
//	/status   the status of the database as JSON, at most a second old
type endpoint struct {
	ready func() error
	read  func(context.Context) (*status.Status, error)

	mu     sync.Mutex // guards what follows; held while the database is read
	latest []byte
	failed error
	at     time.Time
}

const (
	statusAge     = time.Second
	statusTimeout = 5 * time.Second
)

func (e *endpoint) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := e.ready(); err != nil {
			http.Error(w, inFlags(err), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		text, err := e.status(r.Context())
		if err != nil {
			http.Error(w, inFlags(err), http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(text) // an error means that the client has gone
	})
	return mux
}

// status reads the database once for all who ask meanwhile or within a second. That it failed is
// remembered as long: however many ask, one of them waits for a silent database.
func (e *endpoint) status(ctx context.Context) ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Since(e.at) < statusAge {
		return e.latest, e.failed
	}
	// Not canceled with this request: others wait for the same answer.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statusTimeout)
	defer cancel()
	e.latest, e.failed = e.fresh(ctx)
	e.at = time.Now()
	return e.latest, e.failed
}

func (e *endpoint) fresh(ctx context.Context) ([]byte, error) {
	s, err := e.read(ctx)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(described(s))
	return append(text, '\n'), err
}

// serve serves until ctx ends.
func (e *endpoint) serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler: e.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute,
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // Serve returns http.ErrServerClosed
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("--listen: %w", err)
	}
	return nil
}

// described is a status with its problems, as the command and the endpoint print it.
func described(s *status.Status) any {
	return struct {
		*status.Status
		Problems []string
	}{s, append([]string{}, s.Problems()...)}
}
