package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// A downstream's answer that asks for a retry is passed on, and not stored.
func TestMiddleware_StoresNoAnswerThatAsksToComeAgain(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(http.ResponseWriter){
		"Retry-After": func(w http.ResponseWriter) { w.Header().Set("Retry-After", "1") },
		"in-progress": func(w http.ResponseWriter) { w.Header().Set("Content-Type", "application/problem+json; charset=utf-8") },
	} {
		runs := 0
		handler := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if runs++; runs > 1 {
				return
			}
			answer(w)
			w.WriteHeader(http.StatusConflict)
			_, _ = w.Write([]byte(`{"type": "https://psp.example/problems#in-progress"}`))
		}))
		first, second := do(t, handler, post("/", "x")), do(t, handler, post("/", "x"))
		if first.Code != http.StatusConflict || second.Code != http.StatusOK {
			t.Errorf("%s: %d, then %d", name, first.Code, second.Code)
		}
	}
}

// A downstream that still runs its request is asked again by the next copy. If it does not know what became of it, the
// outcome is unknown. What only looks like that is stored.
func TestMiddleware_StoresNoAnswerOfADownstreamThatHasNone(t *testing.T) {
	t.Parallel()
	engine := onSQLite(t).engine(t, nil)
	for name, middleware := range map[string]func(http.Handler) http.Handler{"Middleware": engine.Middleware, "TxMiddleware": engine.TxMiddleware} {
		for _, problem := range []string{"in-progress", "outcome-unknown", "payment-in-progress"} {
			for _, status := range []int{http.StatusAccepted, http.StatusConflict} {
				runs := 0
				handler := middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					runs++
					w.Header().Set("Content-Type", "application/problem+json")
					if problem == "payment-in-progress" && status == http.StatusAccepted {
						w.Header().Set("Retry-After", "1") // an order that is being carried out: the answer to this request
					}
					w.WriteHeader(status)
					fmt.Fprintf(w, `{"type": "https://psp.example/problems#%s"}`, problem)
				}))
				key := withKey(fmt.Sprint(name, problem, status))
				if w := do(t, handler, post("/", "x", key)); w.Code != status || problemOf(w) != problem {
					t.Errorf("%s, %d %s: %d %s", name, status, problem, w.Code, w.Body)
				}
				again, want := do(t, handler, post("/", "x", key)), 2
				switch {
				case problem == "payment-in-progress":
					want = 1
				case problem == "outcome-unknown" && name == "Middleware":
					want = 1
					expectProblem(t, again, http.StatusConflict, "outcome-unknown")
				}
				if replayed := again.Header().Get("Idempotency-Replayed") != ""; runs != want || replayed != (problem == "payment-in-progress") {
					t.Errorf("%s, %d %s: ran %d times, replayed %t", name, status, problem, runs, replayed)
				}
			}
		}
	}
}

// Headers are stored as bytes, and connection headers are not replayed.
func TestMiddleware_ReplaysHeadersAsTheyWere(t *testing.T) {
	t.Parallel()
	const latin = "attachment; filename=\"caf\xe9\""
	handler := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Disposition", latin)
		w.Header().Set("Connection", "X-Hop, close")
		w.Header().Set("X-Hop", "once")
		w.Header().Set("Idempotency-Replayed", "true") // of a downstream
	}))
	first, again := do(t, handler, post("/", "x")), do(t, handler, post("/", "x"))
	if first.Header().Get("Idempotency-Replayed") != "" || again.Header().Get("Idempotency-Replayed") != "true" {
		t.Error("the first answer is marked as a replay, or the replay is not")
	}
	if got := again.Header().Get("Content-Disposition"); got != latin {
		t.Errorf("replayed as %q", got)
	}
	if first.Header().Get("X-Hop") == "" || again.Header().Get("X-Hop") != "" {
		t.Errorf("a header of the connection: %q, then %q", first.Header(), again.Header())
	}
}

// A handler that sets a content type of no values wants none, which net/http would choose.
func TestMiddleware_ReplaysNoContentTypeWhereThereWasNone(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Content-Type"] = nil
		_, _ = io.WriteString(w, "<html>")
	})))
	defer server.Close()
	for _, replayed := range []string{"", "true"} {
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader("x"))
		r.Header.Set("Idempotency-Key", "key")
		response, err := server.Client().Do(r)
		if err != nil || response.Header.Get("Idempotency-Replayed") != replayed {
			t.Fatal(response, err)
		}
		_ = response.Body.Close()
		if got := response.Header.Values("Content-Type"); len(got) > 0 {
			t.Errorf("replayed: %q, content type %q", replayed, got)
		}
	}
}

// A panic of a handler whose time was up is in the log, since there is no other sign of it.
func TestMiddleware_LogsAPanicAfterATimeout(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
		c.Timeout, c.Logger = 100*time.Millisecond, slog.New(slog.NewTextHandler(&log, nil))
	})
	w := do(t, engine.Middleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		panic("on purpose")
	})), post("/", "x"))
	expectProblem(t, w, http.StatusServiceUnavailable, "execution-timeout")
	if !strings.Contains(log.String(), `msg="handler panicked"`) || !strings.Contains(log.String(), "on purpose") {
		t.Errorf("logged: %s", log.String())
	}
}

// A panic of Answers.Write, when time is up, keeps neither the claim nor its success: the client gets no answer, and the
// next copy that of the handler.
func TestMiddleware_APanicOfAWriterKeepsNoKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		runs := 0
		handler := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Logger = slog.New(slog.NewTextHandler(&log, nil))
			c.Answers.Write = func(w http.ResponseWriter, r *http.Request, p idempotency.Problem) {
				if p.Kind == idempotency.ProblemExecutionTimeout {
					panic("on purpose")
				}
				idempotency.WriteProblem(w, r, p)
			}
		}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs++
			<-r.Context().Done()
			w.WriteHeader(http.StatusCreated)
		}))
		func() {
			defer func() {
				if p := recover(); p != http.ErrAbortHandler { //nolint:errorlint // as net/http compares it
					t.Errorf("panicked with %v", p)
				}
			}()
			do(t, handler, post("/", "x"))
		}()
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusCreated || runs != 1 {
			t.Errorf("then %d %s, %d runs", w.Code, w.Body, runs)
		}
		if !strings.Contains(log.String(), `msg="answer not written"`) || !strings.Contains(log.String(), "on purpose") {
			t.Errorf("logged %s", log.String())
		}
	})
}

func TestMiddleware_HandlersMaySetDeadlines(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c := http.NewResponseController(w)
		in := time.Now().Add(time.Minute)
		if err := errors.Join(c.SetReadDeadline(in), c.SetWriteDeadline(in), c.EnableFullDuplex()); err != nil {
			t.Error(err)
		}
	})))
	defer server.Close()
	r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader("x"))
	r.Header.Set("Idempotency-Key", "key")
	response, err := server.Client().Do(r)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatal(response, err)
	}
	_ = response.Body.Close()
}

// A failure ends as the handler declares, and as Config.Failures.Failed selects.
func TestMiddleware_FailuresWithoutEffectReleaseTheKey(t *testing.T) {
	t.Parallel()
	failures := map[string]func(w http.ResponseWriter, r *http.Request){
		"panic":    func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"5xx":      func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"time-out": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done(); panic(http.ErrAbortHandler) },
		"late 422": func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			w.WriteHeader(http.StatusUnprocessableEntity)
		},
	}
	for name, fail := range failures {
		for _, c := range []struct {
			declares bool
			policy   idempotency.FailurePolicy
			want     string
		}{
			{false, idempotency.FailedUnknown, "outcome-unknown"},
			{true, idempotency.FailedUnknown, ""},
			{false, idempotency.FailedRelease, ""},
		} {
			runs := 0
			handler := newEngine(t, &idempotency.MemoryStore{}, func(cfg *idempotency.Config) {
				cfg.Failures.Failed = c.policy
				if name == "time-out" || name == "late 422" {
					cfg.Timeout = 300 * time.Millisecond
				}
				cfg.Answers.StatusPath = "/status/"
			}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if runs++; runs > 1 {
					return
				}
				if c.declares {
					idempotency.NoEffect(r.Context())
				}
				fail(w, r)
			}))
			func() {
				defer func() { _ = recover() }()
				if w := do(t, handler, post("/", "x")); w.Code == http.StatusServiceUnavailable && strings.Contains(w.Body.String(), "Send it again") {
					t.Errorf("%s: whose outcome is unknown is told %s", name, w.Body)
				}
			}()
			w := do(t, handler, post("/", "x"))
			if problemOf(w) != c.want || c.want == "" && w.Code != http.StatusOK {
				t.Errorf("%s, %+v: then %d %s", name, c, w.Code, w.Body)
			}
		}
	}
}

// Several copies wait; the first run fails, and so do the next ones: all are answered when
// one has succeeded.
func TestMiddleware_WaitsThoughTheFirstFails(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var runs atomic.Int64
		handler := p.engine(t, func(c *idempotency.Config) {
			c.Answers.InProgress, c.Answers.WaitTimeout = idempotency.InProgressWait, 30*time.Second
		}).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			n := runs.Add(1)
			testserver.Pause(t.Context(), 100*time.Millisecond)
			if n <= 3 {
				w.WriteHeader(http.StatusInternalServerError)
			}
		}))
		var mu sync.Mutex
		statuses := map[int]int{}
		var sending sync.WaitGroup
		for range 10 {
			sending.Go(func() {
				w := do(t, handler, post("/", "x"))
				mu.Lock()
				defer mu.Unlock()
				statuses[w.Code]++
			})
		}
		sending.Wait()
		if statuses[500] != 3 || statuses[200] != 7 {
			t.Errorf("answered with %v", statuses)
		}
	})
}

// cacheOf is a cache of one record.
type cacheOf struct {
	record atomic.Pointer[idempotency.Record]
}

func (c *cacheOf) Get(context.Context, idempotency.ID) (idempotency.Record, bool) {
	if r := c.record.Load(); r != nil {
		return *r, true
	}
	return idempotency.Record{}, false
}

func (c *cacheOf) Put(_ context.Context, r idempotency.Record) { c.record.CompareAndSwap(nil, &r) }

// A cached record is used if it fits; otherwise the store is asked.
func TestMiddleware_ASpoiltCacheCostsADetour(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		cache := &cacheOf{}
		handler := newEngine(t, store, func(c *idempotency.Config) { c.Responses.Cache = cache }).Middleware(ok("genuine"))
		do(t, handler, post("/", "x"))
		good := *cache.record.Load()
		for name, spoil := range map[string]func(*idempotency.Record){
			"nothing":             func(*idempotency.Record) {},
			"damaged":             func(r *idempotency.Record) { r.Response = []byte{9, 9, 9} },
			"empty":               func(r *idempotency.Record) { r.Response = nil },
			"of another request":  func(r *idempotency.Record) { r.Fingerprint[5]++ },
			"of another key":      func(r *idempotency.Record) { r.ID[5]++ },
			"that is not done":    func(r *idempotency.Record) { r.State = idempotency.StateStarted },
			"which is not stored": func(r *idempotency.Record) { r.State = idempotency.StateNotReplayable },
		} {
			spoilt := good
			spoil(&spoilt)
			cache.record.Store(&spoilt)
			if w := do(t, handler, post("/", "x")); w.Body.String() != "genuine" || w.Header().Get("Idempotency-Replayed") == "" {
				t.Errorf("%s: %d %s", name, w.Code, w.Body)
			}
			expectProblem(t, do(t, handler, post("/", "y")), http.StatusUnprocessableEntity, "key-reused")
		}
	})
}

// The answer of a request whose commit was refused is in no cache: the next one runs.
func TestTxMiddleware_ACacheKeepsNothingThatWasRolledBack(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.exec(t, `create table parents (id integer primary key)`)
		p.exec(t, `create table children (id integer references parents (id) deferrable initially deferred)`)
		cache := &cacheOf{}
		handler := p.engine(t, func(c *idempotency.Config) { c.Responses.Cache = cache }).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			if _, err := tx.ExecContext(r.Context(), `insert into children values (1)`); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
		}))
		expectProblem(t, do(t, handler, post("/", "x")), http.StatusInternalServerError, "commit-failed")
		p.exec(t, `insert into parents values (1)`)
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusCreated || w.Header().Get("Idempotency-Replayed") != "" {
			t.Errorf("then %d %v", w.Code, w.Header())
		}
		if n := p.count(t, `select count(*) from children`); n != 1 {
			t.Errorf("%d effects", n)
		}
	})
}

// A response above the limit is sent once, whole, and its request does not run again.
func TestMiddleware_ResponsesThatAreTooLargeAreNotRunAgain(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 200)
	handler := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.MaxSize = 100 }).Middleware(ok(large))
	if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || w.Body.String() != large {
		t.Errorf("%d, %d bytes", w.Code, w.Body.Len())
	}
	expectProblem(t, do(t, handler, post("/", "x")), http.StatusConflict, "response-not-stored")
}

// The status distinguishes a key that may be sent again from one whose outcome is unknown.
func TestStatus_TellsReleasedFromUnknown(t *testing.T) {
	t.Parallel()
	for released, want := range map[bool]string{true: "absent", false: "interrupted"} {
		goOn, running := make(chan struct{}), make(chan struct{})
		engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Answers.StatusPath, c.Answers.InProgress = "/status/", idempotency.InProgressAccepted
		})
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(running)
			<-goOn
			if released {
				idempotency.NoEffect(r.Context())
			}
			w.WriteHeader(http.StatusBadGateway)
		}))
		var sending sync.WaitGroup
		sending.Go(func() { do(t, handler, post("/", "x")) })
		<-running
		where := do(t, handler, post("/", "x")).Header().Get("Location")
		close(goOn)
		sending.Wait()
		w := do(t, engine.StatusHandler(), httptest.NewRequest(http.MethodGet, where, nil))
		if !strings.Contains(w.Body.String(), `"state":"`+want+`"`) {
			t.Errorf("released %t: %d %s", released, w.Code, w.Body)
		}
	}
}
