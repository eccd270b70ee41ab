package idempotency_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// unreliable loses calls of the store or their answers, and delays them.
type unreliable struct {
	idempotency.Store
	mu   sync.Mutex
	dice *rand.Rand
}

func (s *unreliable) roll(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dice.IntN(n)
}

// call returns whether to call, and whether to lose the answer.
func (s *unreliable) call() (before, after error) {
	time.Sleep(time.Duration(s.roll(30)) * time.Millisecond)
	switch s.roll(12) {
	case 0:
		return errDead, nil
	case 1:
		return nil, errDead
	case 2:
		time.Sleep(time.Duration(s.roll(3000)) * time.Millisecond)
	}
	return nil, nil
}

func (s *unreliable) Claim(ctx context.Context, c idempotency.Claim) (r idempotency.Record, granted bool, err error) {
	before, after := s.call()
	if before == nil {
		r, granted, before = s.Store.Claim(ctx, c)
	}
	if after != nil {
		return idempotency.Record{}, false, after
	}
	return r, granted, before
}

func (s *unreliable) TakeOver(ctx context.Context, c idempotency.Claim, from idempotency.Owner) (r idempotency.Record, granted bool, err error) {
	before, after := s.call()
	if before == nil {
		r, granted, before = s.Store.TakeOver(ctx, c, from)
	}
	if after != nil {
		return idempotency.Record{}, false, after
	}
	return r, granted, before
}

func (s *unreliable) set(do func() error) error {
	before, after := s.call()
	if before == nil {
		before = do()
	}
	if after != nil {
		return after
	}
	return before
}

func (s *unreliable) Extend(ctx context.Context, id idempotency.ID, owner idempotency.Owner, lease time.Duration) error {
	return s.set(func() error { return s.Store.Extend(ctx, id, owner, lease) })
}

func (s *unreliable) Complete(ctx context.Context, id idempotency.ID, owner idempotency.Owner, c idempotency.Completion) error {
	return s.set(func() error { return s.Store.Complete(ctx, id, owner, c) })
}

func (s *unreliable) Release(ctx context.Context, id idempotency.ID, owner idempotency.Owner) error {
	return s.set(func() error { return s.Store.Release(ctx, id, owner) })
}

// However store calls and handlers fail, and in any order: there is at most one effect, all
// answers are those of the run that had it, and a client that retries gets an answer.
func TestRunner_OneEffectUnderAnySchedule(t *testing.T) {
	t.Parallel()
	ends := map[string]int{}
	for seed := range uint64(400) {
		synctest.Test(t, func(t *testing.T) { ends[schedule(t, seed)]++ })
	}
	t.Logf("ended as %v", ends)
	if ends["stored"] < 50 || ends["unknown"] < 50 {
		t.Errorf("ended as %v: too few of one kind", ends)
	}
}

func schedule(t *testing.T, seed uint64) string {
	t.Helper()
	dice := rand.New(rand.NewPCG(seed, 1))
	store := &unreliable{Store: &idempotency.MemoryStore{}, dice: dice}
	engine := newEngine(t, store, func(c *idempotency.Config) {
		c.Timeout, c.Failures.Lease, c.Keys.MaxOutstanding = 2*time.Second, 3*time.Second, idempotency.Unlimited
	})
	var mu sync.Mutex
	effects, runs := 0, 0
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration(store.roll(4000)) * time.Millisecond) // some come late
		how := store.roll(6)
		if how == 0 {
			idempotency.NoEffect(r.Context())
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		mu.Lock()
		effects++
		runs++
		n := runs
		mu.Unlock()
		time.Sleep(time.Duration(store.roll(1000)) * time.Millisecond)
		switch how {
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			w.WriteHeader(http.StatusInternalServerError)
		default:
			fmt.Fprintf(w, "run %d", n)
		}
	}))
	var answers []string
	var sending sync.WaitGroup
	for range 5 {
		sending.Go(func() {
			time.Sleep(time.Duration(store.roll(5000)) * time.Millisecond)
			for try := range 1000 {
				w := httptest.NewRecorder()
				func() {
					defer func() { _ = recover() }()
					handler.ServeHTTP(w, post("/", "x"))
				}()
				if kind := problemOf(w); w.Code == http.StatusOK && w.Body.Len() > 0 || kind == "outcome-unknown" {
					mu.Lock()
					defer mu.Unlock()
					if w.Code == http.StatusOK {
						kind = w.Body.String()
					}
					answers = append(answers, kind)
					return
				}
				time.Sleep(time.Duration(100+store.roll(400)) * time.Millisecond)
				if try == 999 {
					t.Errorf("seed %d: no end: %d %s", seed, w.Code, w.Body)
				}
			}
		})
	}
	sending.Wait()
	if effects > 1 {
		t.Errorf("seed %d: %d effects", seed, effects)
	}
	end := "unknown"
	for _, a := range answers {
		if a != "outcome-unknown" {
			end = "stored"
			if a != "run 1" {
				t.Errorf("seed %d: answered with %q", seed, answers)
			}
		}
	}
	return end
}
