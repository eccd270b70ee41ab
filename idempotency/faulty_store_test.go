package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

func TestMiddleware_CrashPolicies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		recovery := idempotency.Recovery{}
		crash := func(policy idempotency.CrashPolicy) http.Handler {
			store := &idempotency.MemoryStore{}
			engine := newEngine(t, store, func(c *idempotency.Config) {
				c.Failures.Crashed = policy
				if policy == idempotency.CrashedRecover {
					c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) { return recovery, nil }
				}
			})
			// What a crash leaves: a claim that nobody ends.
			release := make(chan struct{})
			dying := newEngine(t, dyingStore{store}, nil).Middleware(ok("lost"))
			_ = do(t, dying, post("/", "x"))
			close(release)
			time.Sleep(time.Minute)
			return engine.Middleware(ok("again"))
		}
		handler := crash(idempotency.CrashedUnknown)
		for range 2 {
			expectProblem(t, do(t, handler, post("/", "x")), 409, "outcome-unknown")
		}
		if w := do(t, crash(idempotency.CrashedTakeOver), post("/", "x")); w.Body.String() != "again" {
			t.Errorf("TakeOver: %d %s", w.Code, w.Body)
		}
		handler = crash(idempotency.CrashedRecover)
		for range 2 {
			expectProblem(t, do(t, handler, post("/", "x")), 409, "outcome-unknown")
		}
		recovery = idempotency.Recovery{Status: 103} // no answer
		expectProblem(t, do(t, handler, post("/", "x")), 409, "outcome-unknown")
		recovery = idempotency.Recovery{Status: 201, Header: http.Header{"Location": {"/orders/7"}, "Content-Length": {"2"}}, Body: []byte("found")}
		for range 2 {
			if w := do(t, handler, post("/", "x")); w.Code != 201 || w.Body.String() != "found" || w.Header().Get("Location") != "/orders/7" {
				t.Errorf("Recover: %d %s", w.Code, w.Body)
			}
		}
		recovery = idempotency.Recovery{RunAgain: true}
		if w := do(t, crash(idempotency.CrashedRecover), post("/", "x")); w.Body.String() != "again" {
			t.Errorf("Recover, run again: %d %s", w.Code, w.Body)
		}
	})
}

// dyingStore never hears of the end of a run.
type dyingStore struct{ idempotency.Store }

var errDead = errors.New("dead")

func (dyingStore) Complete(context.Context, idempotency.ID, idempotency.Owner, idempotency.Completion) error {
	return errDead
}

func (dyingStore) Release(context.Context, idempotency.ID, idempotency.Owner) error { return errDead }

// mutteringStore loses the first answers of TakeOver and Complete, and finds nothing.
type mutteringStore struct {
	idempotency.Store
	tookOver, completed *atomic.Bool
}

func muttering(store idempotency.Store) mutteringStore {
	return mutteringStore{store, &atomic.Bool{}, &atomic.Bool{}}
}

func (s mutteringStore) TakeOver(ctx context.Context, c idempotency.Claim, from idempotency.Owner) (idempotency.Record, bool, error) {
	r, granted, err := s.Store.TakeOver(ctx, c, from)
	if s.tookOver.CompareAndSwap(false, true) {
		return idempotency.Record{}, false, errDead
	}
	return r, granted, err
}

func (s mutteringStore) Complete(ctx context.Context, id idempotency.ID, owner idempotency.Owner, c idempotency.Completion) error {
	err := s.Store.Complete(ctx, id, owner, c)
	if s.completed.CompareAndSwap(false, true) {
		return errDead
	}
	return err
}

func (mutteringStore) Find(context.Context, idempotency.ID) (idempotency.Record, bool, error) {
	return idempotency.Record{}, false, errDead
}

// A request whose takeover was granted without an answer has not run, but the dead owner may
// have.
func TestMiddleware_ALostAnswerOfATakeOverForgetsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, runs := &idempotency.MemoryStore{}, 0
		do(t, newEngine(t, dyingStore{store}, nil).Middleware(counted(&runs)), post("/", "x"))
		time.Sleep(time.Minute)
		handler := newEngine(t, muttering(store), func(c *idempotency.Config) {
			c.Failures.Crashed = idempotency.CrashedRecover
			c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
				return idempotency.Recovery{Status: 201, Body: []byte("found")}, nil
			}
		}).Middleware(counted(&runs))
		expectProblem(t, do(t, handler, post("/", "x")), 503, "store-unavailable")
		do(t, handler, post("/", "x"))
		if w := do(t, handler, post("/", "x")); w.Body.String() != "found" || runs != 1 {
			t.Errorf("ran %d times: %d %s", runs, w.Code, w.Body)
		}
	})
}

// lateStore answers when its caller's time is up.
type lateStore struct {
	idempotency.Store
	end context.CancelFunc
}

func (s lateStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	defer s.end()
	return s.Store.Claim(ctx, c)
}

func (s lateStore) TakeOver(ctx context.Context, c idempotency.Claim, from idempotency.Owner) (idempotency.Record, bool, error) {
	defer s.end()
	return s.Store.TakeOver(ctx, c, from)
}

// A claim that is granted after the caller has gone runs nothing, and is released.
func TestDo_BeginsNothingWhenItsCallerHasGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &idempotency.MemoryStore{}
		takeOver := func(c *idempotency.Config) { c.Failures.Crashed = idempotency.CrashedTakeOver }
		runs := 0
		command := func(ctx context.Context, store idempotency.Store) error {
			cmd := idempotency.Command{Name: "a", Key: "a"}
			_, err := idempotency.Do(ctx, newEngine(t, store, takeOver), cmd, func(context.Context) (int, error) { runs++; return runs, nil })
			return err
		}
		late := func() {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			if err := command(ctx, lateStore{store, cancel}); !errors.Is(err, context.Canceled) || runs != 0 {
				t.Errorf("%v, %d runs", err, runs)
			}
		}
		late()                                      // at the claim
		_ = command(t.Context(), dyingStore{store}) // whose claim stays
		runs = 0
		time.Sleep(time.Minute)
		late() // at the takeover
		if err := command(t.Context(), store); err != nil || runs != 1 {
			t.Errorf("%v, %d runs", err, runs)
		}
	})
}

// For a request too, a claim that took all the time does not mean that the store could not
// be reached.
func TestMiddleware_BeginsNothingWithoutTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, runs := &idempotency.MemoryStore{}, 0
		open := func(c *idempotency.Config) { c.Failures.FailOpen = true }
		expectProblem(t, do(t, newEngine(t, slowStore{store}, open).Middleware(counted(&runs)), post("/", "x")), 503, "execution-timeout")
		if runs != 0 {
			t.Errorf("it ran")
		}
		if w := do(t, newEngine(t, store, open).Middleware(counted(&runs)), post("/", "x")); w.Code != 200 || runs != 1 {
			t.Errorf("then %d, %d runs", w.Code, runs)
		}
	})
}

// slowStore takes all the time for a claim.
type slowStore struct{ idempotency.Store }

func (s slowStore) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	<-ctx.Done()
	return s.Store.Claim(context.WithoutCancel(ctx), c)
}

// Failing open runs only requests that have not run.
func TestMiddleware_FailsOpenBeforeTheHandlerOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		open := func(c *idempotency.Config) { c.Failures.FailOpen = true }
		runs := 0
		do(t, newEngine(t, muttering(&idempotency.MemoryStore{}), open).Middleware(counted(&runs)), post("/", "x"))
		if runs != 1 {
			t.Errorf("ran %d times where the answer of storing was lost", runs)
		}
		store := &idempotency.MemoryStore{}
		dying := dyingStore{store}
		do(t, newEngine(t, dying, nil).Middleware(ok("lost")), post("/", "x"))
		time.Sleep(time.Minute)
		runs = 0
		do(t, newEngine(t, dying, func(c *idempotency.Config) {
			open(c)
			c.Failures.Crashed = idempotency.CrashedRecover
			c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
				return idempotency.Recovery{Status: 201}, nil
			}
		}).Middleware(counted(&runs)), post("/", "x"))
		if runs != 0 {
			t.Error("ran what Config.Failures.Recover knows to have run")
		}
	})
}

// A handler that needs a transaction never runs without one.
func TestTxMiddleware_NeverFailsOpen(t *testing.T) {
	t.Parallel()
	p, _ := onSQLite(t).through(t)
	runs := 0
	handler := p.engine(t, func(c *idempotency.Config) { c.Failures.FailOpen = true }).TxMiddleware(counted(&runs))
	if err := p.db.Close(); err != nil {
		t.Fatal(err)
	}
	expectProblem(t, do(t, handler, post("/", "x")), http.StatusServiceUnavailable, "store-unavailable")
	if runs != 0 {
		t.Error("it ran")
	}
}

// deadStore cannot be reached.
type deadStore struct{ dyingStore }

func (deadStore) Outstanding(context.Context, idempotency.Caller, int) (int, error) {
	return 0, errDead
}

func (deadStore) Claim(context.Context, idempotency.Claim) (idempotency.Record, bool, error) {
	return idempotency.Record{}, false, errDead
}

func TestMiddleware_FailsClosed(t *testing.T) {
	t.Parallel()
	for open, want := range map[bool]int{false: 503, true: 200} {
		engine := newEngine(t, deadStore{}, func(c *idempotency.Config) { c.Failures.FailOpen = open })
		if w := do(t, engine.Middleware(ok("ran")), post("/", "x")); w.Code != want {
			t.Errorf("fail open %t: %d %s", open, w.Code, w.Body)
		}
	}
}
