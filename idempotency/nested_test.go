package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A command in a transaction would wait for it, on SQLite, or commit apart from it.
func TestDo_RefusesToRunInATransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, nil)
		ran := func(ctx context.Context, key string) error {
			_, err := idempotency.Do(ctx, engine, idempotency.Command{Name: "a", Key: key}, func(context.Context) (int, error) { return 1, nil })
			return err
		}
		inside := errors.New("not called")
		handler := engine.TxMiddleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { inside = ran(r.Context(), "a") }))
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || !errors.Is(inside, idempotency.ErrInTransaction) {
			t.Errorf("%d, inside: %v", w.Code, inside)
		}
		_, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "b", Key: "b"}, func(ctx context.Context) (int, error) { return 1, ran(ctx, "c") })
		if !errors.Is(err, idempotency.ErrInTransaction) {
			t.Errorf("in a command: %v", err)
		}
		if err := ran(t.Context(), "a"); err != nil {
			t.Errorf("outside: %v", err)
		}
		// Where its effects are elsewhere there is nothing to wait for.
		snapshot := newEngine(t, &idempotency.MemoryStore{}, nil)
		do(t, engine.TxMiddleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, inside = idempotency.Do(r.Context(), snapshot, idempotency.Command{Name: "a", Key: "a"}, func(context.Context) (int, error) { return 1, nil })
		})), post("/", "x", withKey("other")))
		if inside != nil {
			t.Errorf("of another store: %v", inside)
		}
	})
}

// The deadline of a caller holds while the database is silent.
func TestDo_KeepsItsCallersDeadline(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{"idempotency_claim", "begin isolation", "insert into effects", "idempotency_finish"} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			p, proxy := onPostgres(t).behindProxy(t)
			engine := p.engine(t, nil)
			proxy.Silence(testserver.Containing(statement), 1)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			returned := make(chan error, 1)
			go func() {
				_, err := idempotency.Do(ctx, engine, idempotency.Command{Name: "a", Key: "a"}, func(ctx context.Context) (int, error) { return 1, addNamed(ctx, "a") })
				returned <- err
			}()
			select {
			case err := <-returned:
				if err == nil {
					t.Error("it succeeded")
				}
			case <-time.After(20 * time.Second): // Timeout and Lease are longer
				t.Error("it did not return")
			}
			proxy.Cut()
		})
	}
}

// A command that ends its goroutine, as a failing test does, ends that of Do, with the claim
// settled.
func TestDo_EndsItsGoroutineWithThatOfTheCommand(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, store, func(c *idempotency.Config) { c.Failures.Failed = idempotency.FailedRelease })
		var r idempotency.Result[int]
		var err error
		for try := range 5 { // on a busy machine the settlement may have no answer in time
			cmd := idempotency.Command{Name: "a", Key: strconv.Itoa(try)}
			ended := make(chan bool, 1)
			go func() {
				survived := false
				defer func() { ended <- survived }()
				_, _ = idempotency.Do(t.Context(), engine, cmd, func(context.Context) (int, error) { runtime.Goexit(); return 1, nil })
				survived = true
			}()
			if <-ended {
				t.Error("it goes on")
			}
			if r, err = idempotency.Do(t.Context(), engine, cmd, func(context.Context) (int, error) { return 2, nil }); !errors.Is(err, idempotency.ErrInProgress) {
				break
			}
		}
		if err != nil || r.Value != 2 {
			t.Errorf("then %v %v", r, err)
		}
	})
}

func TestDo_RecoversAResult(t *testing.T) {
	t.Parallel()
	store := &idempotency.MemoryStore{}
	cmd := idempotency.Command{Name: "charge", Key: "a"}
	failure := errors.New("no answer")
	run := func(found idempotency.Recovery) (idempotency.Result[string], error) {
		engine := newEngine(t, store, func(c *idempotency.Config) {
			c.Failures.Crashed = idempotency.CrashedRecover
			c.Failures.Recover = func(context.Context, idempotency.Record) (idempotency.Recovery, error) { return found, nil }
		})
		return idempotency.Do(t.Context(), engine, cmd, func(context.Context) (string, error) { return "", failure })
	}
	if _, err := run(idempotency.Recovery{}); !errors.Is(err, failure) || !errors.Is(err, idempotency.ErrOutcomeUnknown) {
		t.Errorf("first: %v", err)
	}
	if _, err := run(idempotency.Recovery{}); !errors.Is(err, idempotency.ErrOutcomeUnknown) || errors.Is(err, failure) {
		t.Errorf("still unknown: %v", err)
	}
	for range 2 {
		if r, err := run(idempotency.Recovery{Status: 200, Body: []byte(`"charged"`)}); err != nil || r.Value != "charged" {
			t.Errorf("found: %+v %v", r, err)
		}
	}
}

// Messages that cannot be published the first time are there the next time, however large.
func TestWatermill_KeepsLargeResults(t *testing.T) {
	onStores(t, []string{"postgresql", "sqlite"}, func(t *testing.T, store idempotency.Store) {
		runs := 0
		handler := newEngine(t, store, func(c *idempotency.Config) {
			c.Responses.MaxSize, c.Timeout, c.Failures.Lease = 1000, testserver.MaxWait, 2*testserver.MaxWait
		}).Watermill("c", nil)(func(m *message.Message) ([]*message.Message, error) {
			runs++
			size := 2000
			if m.UUID == "huge" {
				size = 49 << 20 // more than 64 MiB with its encoding
			}
			return []*message.Message{message.NewMessage("out", bytes.Repeat([]byte{1}, size))}, nil
		})
		for i := range 3 {
			out, err := handler(message.NewMessageWithContext(t.Context(), "large", nil))
			if err != nil || len(out) != 1 || len(out[0].Payload) != 2000 || runs != 1 {
				t.Errorf("copy %d: %d messages, %v, %d runs", i, len(out), err, runs)
			}
		}
		if !strings.HasSuffix(t.Name(), "/sqlite") && !testserver.Long() {
			return // the limit is that of SQLite
		}
		_, transactional := store.(*idempotency.SQLStore)
		if _, err := handler(message.NewMessageWithContext(t.Context(), "huge", nil)); errors.Is(err, idempotency.ErrTooLarge) != transactional {
			t.Errorf("huge: %v", err)
		}
	})
}
