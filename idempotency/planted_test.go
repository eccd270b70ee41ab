package idempotency_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/idempotency/conformance"
	"github.com/oncemill/oncemill/internal/testserver"
)

// forgetful is a store of a hundred keys.
type forgetful struct {
	idempotency.Store
	mu    sync.Mutex
	known []idempotency.ID
}

func (s *forgetful) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known = append(s.known, c.ID); len(s.known) > 100 {
		s.Store.(*idempotency.MemoryStore).Forget(s.known[0])
		s.known = s.known[1:]
	}
	return s.Store.Claim(ctx, c)
}

// careless looks first and then claims, and grants to all that look at the same time.
type careless struct{ idempotency.Store }

func (s careless) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	_, found, _ := s.Find(ctx, c.ID)
	testserver.Pause(ctx, time.Millisecond)
	r, granted, err := s.Store.Claim(ctx, c)
	if !found && !granted {
		r.Owner, r.State = idempotency.Owner{Token: c.Token, Fence: 1}, idempotency.StateStarted
		granted = true
	}
	return r, granted, err
}

// unrenewed is a store that never extends a lease.
type unrenewed struct{ idempotency.Store }

func (unrenewed) Extend(context.Context, idempotency.ID, idempotency.Owner, time.Duration) error {
	return nil
}

// The suite finds bugs that services have had.
func TestConformance_NoticesPlantedBugs(t *testing.T) {
	t.Parallel()
	memory := func() idempotency.Store { return &idempotency.MemoryStore{} }
	same := func(h http.Handler) http.Handler { return h }
	for bug, b := range map[string]struct {
		noticed string // by this case
		store   idempotency.Store
		change  func(*idempotency.Config)
		outside func(http.Handler) http.Handler
	}{
		"keys are cut to 100 characters": {"all of a long key matters", memory(), nil, func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if key := r.Header.Get("Idempotency-Key"); len(key) > 100 {
					r.Header.Set("Idempotency-Key", key[:100])
				}
				h.ServeHTTP(w, r)
			})
		}},
		"forgets after a second": {"an answer is still there after some seconds", memory(), func(c *idempotency.Config) { c.Retention = time.Second }, same},
		"keeps a hundred keys":   {"an answer is still there after 300 others", &forgetful{Store: memory()}, nil, same},
		"leases of a second": {"a handler of seconds runs once, though copies come all along", unrenewed{memory()}, func(c *idempotency.Config) {
			c.Timeout, c.Failures.Lease, c.Failures.Crashed = 800*time.Millisecond, time.Second, idempotency.CrashedTakeOver
		}, same},
		"loses ETag":          {"ETag, Cache-Control and headers of the service's own are replayed", memory(), func(c *idempotency.Config) { c.Responses.DropHeaders = []string{"ETag"} }, same},
		"loses Cache-Control": {"ETag, Cache-Control and headers of the service's own are replayed", memory(), func(c *idempotency.Config) { c.Responses.DropHeaders = []string{"Cache-Control"} }, same},
		"checks, then acts":   {"of copies that come at once while the first runs none starts", careless{memory()}, nil, same},
		"duplicate names": {"an object with a name twice is not one with either", memory(), nil, func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				r = r.Clone(r.Context())
				r.Body = http.NoBody // as a parser that keeps one of them would have it, at worst
				r.ContentLength = 0
				h.ServeHTTP(w, r)
			})
		}},
	} {
		t.Run(strings.ReplaceAll(bug, " ", "_"), func(t *testing.T) {
			t.Parallel()
			cfg := probeConfig()
			engine := newEngine(t, b.store, func(c *idempotency.Config) {
				if *c = cfg; b.change != nil {
					b.change(c)
				}
			})
			server := httptest.NewServer(b.outside(conformance.NewProbe(engine, &conformance.MemoryEffects{}, capabilitiesOf(cfg, false))))
			defer server.Close()
			suite, err := conformance.New(t.Context(), conformance.Target{URLs: []string{server.URL}})
			if err != nil {
				t.Fatal(err)
			}
			defer suite.Close()
			ran := false
			for _, c := range conformance.Cases() {
				if c.Name == b.noticed {
					ran = true
					if result := suite.Run(t.Context(), c); result.Err == nil || result.Skipped != "" {
						t.Errorf("%q passes", c.Name)
					}
				}
			}
			if !ran {
				t.Errorf("there is no case %q", b.noticed)
			}
		})
	}
}
