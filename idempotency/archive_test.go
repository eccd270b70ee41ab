package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// shelf is an archive that can fail.
type shelf struct {
	mu   sync.Mutex
	kept []idempotency.ArchivedKey
	err  error
	bad  bool // it panics
}

func (s *shelf) archive(_ context.Context, keys []idempotency.ArchivedKey) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bad {
		panic("no shelf")
	}
	if s.err == nil {
		s.kept = append(s.kept, keys...)
	}
	return s.err
}

// outlive lets the retention of all keys end.
func (p *testDB) outlive(t *testing.T) {
	t.Helper()
	past := `statement_timestamp() - interval '1 second'`
	if p.driver == "sqlite" {
		past = `1`
	}
	p.exec(t, `update {{idempotency}} set expires_at = `+past+`, forget_at = `+past+`, lease_until = `+past)
}

func TestArchive_TakesKeysBeforeTheyAreDeleted(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var to shelf
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Expiry.Archive, c.Expiry.PurgeBatch = to.archive, 3
		})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Location", "/orders/"+r.Header.Get("Idempotency-Key"))
			status := http.StatusCreated
			if r.Header.Get("Idempotency-Key") == "0" {
				status = http.StatusBadGateway // its outcome stays unknown
			}
			w.WriteHeader(status)
			_, _ = w.Write([]byte("secret body"))
		}))
		const n = 8
		for i := range n {
			do(t, handler, post("/", "x", withKey(strconv.Itoa(i))))
		}
		if deleted, err := engine.Purge(t.Context()); err != nil || deleted != 0 || len(to.kept) > 0 {
			t.Errorf("what is young: %d, %v", deleted, err)
		}
		p.outlive(t)
		for _, fail := range []func(){func() { to.err = errors.New("full") }, func() { to.err, to.bad = nil, true }} {
			fail()
			if deleted, err := engine.Purge(t.Context()); err == nil || deleted != 0 || p.count(t, `select count(*) from {{idempotency}}`) != n {
				t.Errorf("the archive failed: %d deleted, %v", deleted, err)
			}
		}
		to.bad = false
		if deleted, err := engine.Purge(t.Context()); err != nil || deleted != n || p.count(t, `select count(*) from {{idempotency}}`) != 0 {
			t.Errorf("%d deleted, %v", deleted, err)
		}
		states := map[string]int{}
		for _, k := range to.kept {
			states[k.State]++
			if len(k.ID) != 64 || k.Endpoint != "POST /probe" || k.CreatedAt.IsZero() || (k.State == "started") != (k.CompletedAt == nil) ||
				k.State != "started" && (k.Status != 201 || !strings.HasPrefix(k.Location, "/orders/")) {
				t.Errorf("%+v", k)
			}
		}
		if states["started"] != 1 || states["completed"] != n-1 {
			t.Errorf("archived %v", states)
		}
	})
}

// A key that comes again after its retention does not replace a record that has not been
// archived.
func TestArchive_KeepsTheRecordOfAKeyThatComesAgain(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for _, group := range []int{1, 8} {
			var to shelf
			engine := p.engine(t, func(c *idempotency.Config) {
				c.Expiry.Archive, c.Transactions.GroupSize = to.archive, group
			})
			runs := 0
			handler := engine.TxMiddleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { runs++ }))
			key := withKey("key" + strconv.Itoa(group))
			do(t, handler, post("/", "x", key))
			if w := do(t, handler, post("/", "x", key)); w.Header().Get("Idempotency-Replayed") != "true" {
				t.Errorf("%d %v", w.Code, w.Header())
			}
			p.outlive(t)
			expectProblem(t, do(t, handler, post("/", "x", key)), http.StatusGone, "key-expired")
			if n := p.count(t, `select count(*) from {{idempotency}}`); n != 1 || runs != 1 {
				t.Errorf("%d records, %d runs", n, runs)
			}
			if _, err := engine.Purge(t.Context()); err != nil || len(to.kept) != 1 {
				t.Errorf("archived %d, %v", len(to.kept), err)
			}
			if w := do(t, handler, post("/", "x", key)); w.Code != http.StatusOK || runs != 2 {
				t.Errorf("%d, %d runs", w.Code, runs)
			}
			p.exec(t, `delete from {{idempotency}}`)
		}
	})
}

func TestArchive_IsLeftToAnother(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) { c.Expiry.ArchivedElsewhere = true })
		handler := engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		do(t, handler, post("/", "x"))
		p.outlive(t)
		if n, err := engine.Purge(t.Context()); err != nil || n != 0 {
			t.Errorf("purged %d, %v", n, err)
		}
		expectProblem(t, do(t, handler, post("/", "x")), http.StatusGone, "key-expired")
		var to shelf
		if n, err := p.store.PurgeArchived(t.Context(), 10, to.archive); err != nil || n != 1 || len(to.kept) != 1 {
			t.Errorf("purged %d, archived %d, %v", n, len(to.kept), err)
		}
	})
}

// Several purges at once, and keys that are claimed again meanwhile: each record that is
// gone was archived.
func TestArchive_LosesNothingWhenManyPurge(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var to shelf
		const n, rounds = 20, 3
		engine := p.engine(t, func(c *idempotency.Config) { c.Expiry.Archive, c.Expiry.PurgeBatch = to.archive, 5 })
		handler := engine.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for range rounds {
			for i := range n {
				if w := do(t, handler, post("/", "x", withKey(strconv.Itoa(i)))); w.Code != http.StatusOK {
					t.Fatalf("%d %s", w.Code, w.Body)
				}
			}
			p.outlive(t)
			var working sync.WaitGroup
			for range 3 {
				working.Go(func() {
					if _, err := engine.Purge(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			working.Wait()
			testserver.Eventually(t, "all are purged", func() bool {
				_, err := engine.Purge(t.Context())
				return err == nil && p.count(t, `select count(*) from {{idempotency}}`) == 0
			})
		}
		ids := map[string]map[time.Time]bool{}
		for _, k := range to.kept {
			if ids[k.ID] == nil {
				ids[k.ID] = map[time.Time]bool{}
			}
			ids[k.ID][k.CreatedAt] = true
		}
		for id, times := range ids {
			if len(times) != rounds {
				t.Errorf("%s: archived %d of %d records", id, len(times), rounds)
			}
		}
		if len(ids) != n {
			t.Errorf("archived %d of %d keys", len(ids), n)
		}
	})
}

func TestArchive_NeedsASQLStore(t *testing.T) {
	t.Parallel()
	var to shelf
	_, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{Scope: idempotency.SingleTenant(), Expiry: idempotency.ExpiryConfig{Archive: to.archive, ArchivedElsewhere: true}})
	if n := len(testserver.ConfigErrors(err)); n != 2 {
		t.Errorf("%d errors: %v", n, err)
	}
}

// The process dies after it has archived and before it has deleted: the records are archived
// again, and then deleted.
func TestArchive_IsRepeatedAfterACrash(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		handler := p.engine(t, nil).Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for i := range 3 {
			do(t, handler, post("/", "x", withKey(strconv.Itoa(i))))
		}
		p.outlive(t)
		var to shelf
		dying, die := context.WithCancel(t.Context())
		_, err := p.store.PurgeArchived(dying, 10, func(ctx context.Context, keys []idempotency.ArchivedKey) error {
			defer die()
			return to.archive(ctx, keys)
		})
		if n := p.count(t, `select count(*) from {{idempotency}}`); err == nil || n != 3 || len(to.kept) != 3 {
			t.Errorf("%d records, %d archived, %v", n, len(to.kept), err)
		}
		if n, err := p.store.PurgeArchived(t.Context(), 10, to.archive); err != nil || n != 3 || len(to.kept) != 6 {
			t.Errorf("%d deleted, %d archived, %v", n, len(to.kept), err)
		}
	})
}

// What a user's archive does keeps Run from nothing but its own batch.
func TestEngine_AnArchiveThatEndsItsGoroutineOrHangsEndsNoPurge(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		release := make(chan struct{})
		defer close(release)
		var hangs atomic.Bool
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Expiry.Archive = func(context.Context, []idempotency.ArchivedKey) error {
				if hangs.Load() {
					<-release
				}
				runtime.Goexit()
				return nil
			}
		})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }))
		do(t, handler, post("/", "x"))
		p.outlive(t)
		_, err := engine.Purge(t.Context()) // expires the response
		for range 2 {
			failed := make(chan error, 1)
			ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
			if hangs.Load() {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
			}
			go func() {
				defer close(failed)
				_, err := engine.Purge(ctx)
				failed <- err
			}()
			testserver.Eventually(t, "the purge returns", func() bool {
				select {
				case err = <-failed:
					return true
				default:
					return false
				}
			})
			cancel()
			if err == nil {
				t.Errorf("hangs %t: no error; the archive ended the goroutine, or had the record deleted", hangs.Load())
			}
			hangs.Store(true)
		}
	})
}
