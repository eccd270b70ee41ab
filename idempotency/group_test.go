package idempotency_test

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

func grouped(c *idempotency.Config) { c.Transactions.GroupSize = 50 }

// sendTogether sends a request for each key while the first one's handler runs, so that the
// others are in one group after it. The handler is for all but the first. A request whose
// handler panics has no answer.
func sendTogether(t *testing.T, engine *idempotency.Engine, keys []string, handler http.HandlerFunc) map[string]*httptest.ResponseRecorder {
	t.Helper()
	answers, _ := sendInOrder(t, engine, keys, handler)
	return answers
}

// sendInOrder is sendTogether that also returns the order of the answers.
func sendInOrder(t *testing.T, engine *idempotency.Engine, keys []string, handler http.HandlerFunc) (answers map[string]*httptest.ResponseRecorder, order []string) {
	t.Helper()
	var claimed atomic.Int64
	engine.At(func(point string) {
		if point == "after claim" {
			claimed.Add(1)
		}
	})
	running := make(chan struct{})
	first := "first-" + newRequest().key
	h := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Idempotency-Key") != first {
			handler(w, r)
			return
		}
		close(running)
		limited, cancel := context.WithTimeout(r.Context(), 500*time.Millisecond)
		defer cancel()
		testserver.Poll(limited, func() bool { return claimed.Load() > int64(len(keys)) })
		testserver.Pause(t.Context(), 20*time.Millisecond) // from the claim to the group
	}))
	var mu sync.Mutex
	answers = map[string]*httptest.ResponseRecorder{}
	var sending sync.WaitGroup
	send := func(key string) {
		sending.Go(func() {
			w := httptest.NewRecorder()
			defer func() {
				if recover() != nil {
					w = nil
				}
				mu.Lock()
				defer mu.Unlock()
				answers[key] = w
				order = append(order, key)
			}()
			h.ServeHTTP(w, post("/", key, withKey(key)))
		})
	}
	send(first)
	<-running
	for _, key := range keys {
		send(key)
	}
	sending.Wait()
	return answers, order
}

func keysUpTo(n int) []string { return keysNamed("key", n) }

func keysNamed(name string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprintf("%s-%02d", name, i))
	}
	return keys
}

func addNamed(ctx context.Context, name string) error {
	tx, _ := idempotency.TxFromContext(ctx)
	_, err := tx.ExecContext(ctx, `insert into effects (name) values ($1)`, name)
	return err
}

// A key of a group whose response has expired is refused like any other, and does not run
// again.
func TestGroup_ExpiredKeysAreRefused(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		keys := keysUpTo(8)
		engine := p.engine(t, func(c *idempotency.Config) {
			c.Transactions.GroupSize, c.Retention, c.Expiry.RefuseFor = 50, time.Second, time.Hour
		})
		handler := func(w http.ResponseWriter, r *http.Request) {
			if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.WriteHeader(http.StatusCreated)
		}
		sendTogether(t, engine, keys, handler)
		for _, key := range keys {
			eventually(t, key+" has expired", func() bool {
				w := do(t, engine.TxMiddleware(http.HandlerFunc(handler)), post("/", key, withKey(key)))
				if n := p.count(t, `select count(*) from effects where name = $1`, key); n != 1 {
					t.Fatalf("%s: %d effects", key, n)
				}
				return w.Code == http.StatusGone
			})
		}
	})
}

func TestGroup_SharesOneTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		keys := keysUpTo(20)
		engine := p.engine(t, grouped)
		handler := func(w http.ResponseWriter, r *http.Request) {
			if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
				return
			}
			w.Header().Set("Location", "/orders/"+r.Header.Get("Idempotency-Key"))
			w.WriteHeader(http.StatusCreated)
			fmt.Fprint(w, "answer to ", r.Header.Get("Idempotency-Key"))
		}
		for round, replayed := range []string{"", "true"} {
			answers := sendTogether(t, engine, keys, handler)
			for _, key := range keys {
				if w := answers[key]; w.Code != http.StatusCreated || w.Body.String() != "answer to "+key ||
					w.Header().Get("Location") != "/orders/"+key || w.Header().Get("Idempotency-Replayed") != replayed {
					t.Errorf("round %d, %s: %d %q %v", round, key, w.Code, w.Body, w.Header())
				}
				if n := p.count(t, `select count(*) from effects where name = $1`, key); n != 1 {
					t.Errorf("%s: %d effects", key, n)
				}
			}
		}
		if p.cfg.Dialect == oncemill.PostgreSQL {
			shared := func() bool {
				return p.count(t, `select count(*) - count(distinct xmin::text) from effects`) > 0
			}
			for more := 1; !shared(); more++ { // on a busy machine a group has time for few
				if more > 20 {
					t.Fatal("no two requests have shared a transaction")
				}
				sendTogether(t, engine, keysNamed(fmt.Sprint("more-", more), len(keys)), handler)
			}
			if n := p.count(t, `select count(*) from {{idempotency_open}}`); n != 0 {
				t.Errorf("%d seals are left", n)
			}
		}
	})
}

// Nothing that one member does to itself or to the transaction affects the others: each
// answers with one effect, and the member ends as if it had been alone.
func TestGroup_OneBadRequestSpoilsNobody(t *testing.T) {
	t.Parallel()
	const panicked = 0
	refuse := func(w http.ResponseWriter, status int) { http.Error(w, "no", status) }
	deeds := map[string]struct {
		status, effects int
		onPostgres      bool          // only
		timeout         time.Duration // default: more than a slow machine needs
		do              func(p *testDB, w http.ResponseWriter, r *http.Request)
	}{
		"refuses": {status: http.StatusUnprocessableEntity, do: func(_ *testDB, w http.ResponseWriter, _ *http.Request) {
			refuse(w, http.StatusUnprocessableEntity)
		}},
		"fails":  {status: http.StatusInternalServerError, do: func(_ *testDB, w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusInternalServerError) }},
		"panics": {status: panicked, do: func(*testDB, http.ResponseWriter, *http.Request) { panic("on purpose") }},
		"fails in the database": {status: http.StatusInternalServerError, do: func(_ *testDB, w http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			if _, err := tx.ExecContext(r.Context(), `insert into nowhere values (1)`); err != nil {
				refuse(w, http.StatusInternalServerError)
			}
		}},
		"overlooks an error": {status: http.StatusInternalServerError, onPostgres: true, do: func(_ *testDB, _ http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			_, _ = tx.ExecContext(r.Context(), `insert into nowhere values (1)`)
		}},
		"panics in Storable": {status: http.StatusTeapot, do: func(_ *testDB, w http.ResponseWriter, _ *http.Request) { refuse(w, http.StatusTeapot) }},
		"commits": {status: http.StatusInternalServerError, do: func(_ *testDB, _ http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			_, _ = tx.ExecContext(r.Context(), `commit`)
		}},
		"breaks the commit": {status: http.StatusInternalServerError, onPostgres: true, do: func(_ *testDB, _ http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			_, _ = tx.ExecContext(r.Context(), `insert into late values (1), (1)`)
		}},
		"is slow": {status: http.StatusOK, effects: 1, do: func(*testDB, http.ResponseWriter, *http.Request) {
			testserver.Pause(context.Background(), 1200*time.Millisecond) // and heeds no context
		}},
		// On SQLite it keeps the others from writing, in whatever transaction.
		"takes too long": {status: http.StatusServiceUnavailable, onPostgres: true, timeout: 20 * time.Second, do: func(_ *testDB, _ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		}},
	}
	for deed, d := range deeds {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, before its effect: %t", deed, before), func(t *testing.T) {
				t.Parallel()
				databases := []string{"postgresql"}
				if !d.onPostgres {
					databases = testserver.OneOf(t, "postgresql", "sqlite")
				}
				for _, name := range databases {
					p := testDBs[name](t)
					if p.cfg.Dialect == oncemill.PostgreSQL {
						p.exec(t, `create table late (n int unique deferrable initially deferred)`)
					}
					keys := keysUpTo(12)
					bad := keys[7]
					engine := p.engine(t, func(c *idempotency.Config) {
						c.Transactions.GroupSize, c.Timeout = 50, cmp.Or(d.timeout, 2*time.Minute)
						c.Responses.Storable = func(status int) bool {
							if status == http.StatusTeapot {
								panic("on purpose")
							}
							return idempotency.StorableDefault(status)
						}
					})
					answers := sendTogether(t, engine, keys, func(w http.ResponseWriter, r *http.Request) {
						key := r.Header.Get("Idempotency-Key")
						if key == bad && before {
							d.do(p, w, r)
						}
						if err := addNamed(r.Context(), key); err != nil {
							refuse(w, http.StatusInternalServerError)
							return
						}
						if key == bad && !before {
							d.do(p, w, r)
						}
					})
					for _, key := range keys {
						status, effects := http.StatusOK, 1
						if key == bad {
							status, effects = d.status, d.effects
						}
						got := panicked
						if answers[key] != nil {
							got = answers[key].Code
						}
						if got != status {
							t.Errorf("%s: status %d", key, got)
						}
						if n := p.count(t, `select count(*) from effects where name = $1`, key); n != effects {
							t.Errorf("%s: %d effects", key, n)
						}
					}
					if n := p.count(t, `select count(*) from {{idempotency}} where state = 1`); n != 0 {
						t.Errorf("%d keys are held", n)
					}
				}
			})
		}
	}
}

// Many handlers that are not slow alone do not delay those behind them beyond their timeout.
func TestGroup_ManyThatTakeTheirTimeAllHaveIt(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	engine := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize, c.Timeout = 50, 7*time.Second })
	for key, w := range sendTogether(t, engine, keysUpTo(40), func(w http.ResponseWriter, r *http.Request) {
		if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
			return
		}
		testserver.Pause(t.Context(), 200*time.Millisecond) // 8 s, one after the other
	}) {
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d %s", key, w.Code, w.Body)
		}
	}
	if n := p.count(t, `select count(*) from effects`); n != 40 {
		t.Errorf("%d effects", n)
	}
}

// A handler whose statement ignores its context delays only its own client.
func TestGroup_AStatementThatGoesOnKeepsNobody(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	engine := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize, c.Timeout = 50, 20*time.Second })
	keys := keysUpTo(12)
	bad := keys[7]
	answers, order := sendInOrder(t, engine, keys, func(_ http.ResponseWriter, r *http.Request) {
		key := r.Header.Get("Idempotency-Key")
		_ = addNamed(r.Context(), key) // later it fails, where its group has been given up
		if tx, _ := idempotency.TxFromContext(r.Context()); key == bad {
			_, _ = tx.ExecContext(context.WithoutCancel(r.Context()), `select pg_sleep(4)`)
		}
	})
	if order[len(order)-1] != bad {
		t.Errorf("in this order: %v", order)
	}
	for _, key := range keys {
		if answers[key].Code != http.StatusOK {
			t.Errorf("%s: %d %s", key, answers[key].Code, answers[key].Body)
		}
		if n := p.count(t, `select count(*) from effects where name = $1`, key); n != 1 {
			t.Errorf("%s: %d effects", key, n)
		}
	}
}

// A function of Config that panics for one request does so for that one.
func TestGroup_APanicOfConfigSpoilsNobody(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	keys := keysUpTo(12)
	bad := keys[7]
	engine := p.engine(t, func(c *idempotency.Config) {
		c.Transactions.GroupSize = 50
		c.Expiry.RetentionFor = func(r *http.Request, _ int) time.Duration {
			if r.Header.Get("Idempotency-Key") == bad {
				panic("on purpose")
			}
			return 0
		}
	})
	answers := sendTogether(t, engine, keys, func(w http.ResponseWriter, r *http.Request) {
		if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
			return
		}
	})
	for _, key := range keys {
		if w := answers[key]; (w == nil) != (key == bad) {
			t.Errorf("%s: %v", key, w)
		}
	}
	if n := p.count(t, `select count(*) from effects`); n != 11 {
		t.Errorf("%d effects", n)
	}
}

// Responses of megabytes are not all in one statement, and are stored.
func TestGroup_LargeResponses(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, grouped)
		keys := keysUpTo(12)
		for range 2 {
			for key, w := range sendTogether(t, engine, keys, func(w http.ResponseWriter, r *http.Request) {
				if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
					http.Error(w, err.Error(), http.StatusInternalServerError) // its group may have been given up
					return
				}
				fmt.Fprint(w, strings.Repeat(r.Header.Get("Idempotency-Key"), 100_000))
			}) {
				if slices.Contains(keys, key) && w.Body.String() != strings.Repeat(key, 100_000) {
					t.Errorf("%s: %d, %d bytes", key, w.Code, w.Body.Len())
				}
			}
		}
		if p.cfg.Dialect == oncemill.PostgreSQL {
			if n := p.count(t, `select count(distinct xmin::text) from effects`); n < 2 {
				t.Error("7 MB are in one transaction")
			}
		}
	})
}

func expectAllOnceInConflict(t *testing.T, p *testDB) {
	t.Helper()
	p.exec(t, `create table hot (id integer primary key, n integer not null)`)
	const rows, requests = 20, 80
	for i := range rows {
		p.exec(t, `insert into hot values ($1, 0)`, i)
	}
	levels := []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		for range 2 {
			if _, err := tx.ExecContext(r.Context(), `update hot set n = n + 1 where id = $1`, rand.IntN(rows)); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		}
		if rand.IntN(10) == 0 {
			http.Error(w, "no", http.StatusForbidden) // is not stored
		}
	})
	var handlers []http.Handler
	for range 2 {
		handlers = append(handlers, p.engine(t, func(c *idempotency.Config) {
			c.Transactions.GroupSize, c.Transactions.Retries, c.Transactions.Isolation = 50, 1000, levels[rand.IntN(len(levels))]
			c.Answers.InProgress = idempotency.InProgressWait
		}).TxMiddleware(handler))
	}
	var next atomic.Int64
	var sending sync.WaitGroup
	for range 8 {
		sending.Go(func() {
			for {
				n := next.Add(1)
				if n > 2*requests {
					return
				}
				key := fmt.Sprint(n % requests) // each twice
				for {
					w := do(t, handlers[rand.IntN(2)], post("/", "x", withKey(key)))
					if w.Code == http.StatusOK {
						break
					}
					if w.Code != http.StatusForbidden {
						t.Errorf("%s: %d %s", key, w.Code, w.Body)
						return
					}
				}
			}
		})
	}
	sending.Wait()
	if n := p.count(t, `select sum(n) from hot`); n != 2*requests {
		t.Errorf("%d effects, want %d", n, 2*requests)
	}
}
