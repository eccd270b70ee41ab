package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// losing makes a function that fails like a transaction that lost against another.
func losing(t *testing.T) *testDB {
	t.Helper()
	p := onPostgres(t)
	p.exec(t, `create function lose(i int, at int) returns int language plpgsql as $$
		begin if i = at then raise exception 'lost' using errcode = '40001'; end if; return i; end $$`)
	return p
}

// However a handler learns that its transaction lost, it runs again, and its first answer is
// not stored.
func TestTxMiddleware_RunsAgainHoweverAStatementFails(t *testing.T) {
	t.Parallel()
	p := losing(t)
	deeds := map[string]func(context.Context, oncemill.Tx) error{
		"exec": func(ctx context.Context, tx oncemill.Tx) error {
			_, err := tx.ExecContext(ctx, `select lose(1, 1)`)
			return err
		},
		"row": func(ctx context.Context, tx oncemill.Tx) error {
			return tx.QueryRowContext(ctx, `select lose(1, 1)`).Scan(new(int))
		},
		"prepared": func(ctx context.Context, tx oncemill.Tx) error {
			stmt, err := tx.PrepareContext(ctx, `select lose(1, 1)`)
			if err != nil {
				return err
			}
			defer stmt.Close()
			_, err = stmt.ExecContext(ctx)
			return err
		},
		"the last of many rows": func(ctx context.Context, tx oncemill.Tx) error {
			rows, err := tx.QueryContext(ctx, `select lose(i, 5000) from generate_series(1, 5000) as i`)
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
			}
			return rows.Err()
		},
	}
	for how, lose := range deeds {
		for _, status := range []int{http.StatusConflict, http.StatusOK} { // it minds, or it does not
			t.Run(fmt.Sprint(how, " ", status), func(t *testing.T) {
				t.Parallel()
				runs := 0
				handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if runs++; runs > 1 {
						w.WriteHeader(http.StatusCreated)
						return
					}
					tx, _ := idempotency.TxFromContext(r.Context())
					if err := lose(r.Context(), tx); err == nil {
						t.Error("it did not fail")
					}
					w.WriteHeader(status)
				}))
				key := withKey(fmt.Sprint(how, status))
				if strings.Contains(how, " ") {
					key = withKey(fmt.Sprintf("%q", fmt.Sprint(how, status)))
				}
				if w := do(t, handler, post("/", "x", key)); w.Code != http.StatusCreated || runs != 2 {
					t.Errorf("%d after %d attempts", w.Code, runs)
				}
			})
		}
	}
}

// The answer of a failed transaction is sent, and not stored: the next attempt may succeed.
// The handler does not run again if its own statement was refused.
func TestTxMiddleware_StoresNoAnswerOfAnAbortedTransaction(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	p.exec(t, `create table names (name text primary key)`)
	p.exec(t, `insert into names values ('taken')`)
	for _, savepoint := range []bool{false, true} {
		runs := 0
		handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			runs++
			tx, _ := idempotency.TxFromContext(r.Context())
			if savepoint {
				_, _ = tx.ExecContext(r.Context(), `savepoint s`)
			}
			if _, err := tx.ExecContext(r.Context(), `insert into names values ('taken')`); err != nil {
				if savepoint {
					_, _ = tx.ExecContext(r.Context(), `rollback to savepoint s`)
				}
				w.WriteHeader(http.StatusConflict)
			}
		}))
		for i := range 2 {
			w := do(t, handler, post("/", "x", withKey(fmt.Sprint(savepoint))))
			replayed := w.Header().Get("Idempotency-Replayed") != ""
			if w.Code != http.StatusConflict || replayed != (savepoint && i == 1) {
				t.Errorf("savepoint %t, time %d: %d, replayed %t", savepoint, i, w.Code, replayed)
			}
		}
		if want := map[bool]int{false: 2, true: 1}[savepoint]; runs != want {
			t.Errorf("savepoint %t: ran %d times, want %d", savepoint, runs, want)
		}
	}
}

func TestTxMiddleware_SaysThatItLostWhenItMayNotTryAgain(t *testing.T) {
	t.Parallel()
	p := losing(t)
	handler := p.engine(t, func(c *idempotency.Config) { c.Transactions.Retries = 2 }).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		if _, err := tx.ExecContext(r.Context(), `select lose(1, 1)`); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	w := do(t, handler, post("/", "x"))
	expectProblem(t, w, http.StatusServiceUnavailable, "contended")
	if w.Header().Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	if n := p.count(t, `select count(*) from {{idempotency}}`); n != 0 {
		t.Errorf("%d keys are held", n)
	}
}

// State that one attempt set is not visible to the next one.
func TestTxMiddleware_AnAttemptHasAStateOfItsOwn(t *testing.T) {
	t.Parallel()
	p := losing(t)
	runs := 0
	handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("X-Mark") != "" || r.URL.Path != "/orders" || r.Form != nil || string(body) != "x" {
			t.Errorf("attempt %d finds %v %v %v %q", runs+1, r.Header, r.URL, r.Form, body)
		}
		if runs++; runs == 1 {
			idempotency.SetResourceID(r.Context(), "of the first attempt")
			r.Header.Set("X-Mark", "1")
			r.URL.Path = "/elsewhere"
			_ = r.ParseForm()
			tx, _ := idempotency.TxFromContext(r.Context())
			_, _ = tx.ExecContext(r.Context(), `select lose(1, 1)`)
		}
		w.WriteHeader(http.StatusGone)
	}))
	if w := do(t, handler, post("/orders", "x")); w.Code != http.StatusGone || runs != 2 {
		t.Errorf("%d after %d attempts", w.Code, runs)
	}
	if n := p.count(t, `select count(*) from {{idempotency}} where resource_id is not null`); n != 0 {
		t.Error("the resource of an attempt that was rolled back is stored")
	}
}

func TestTxMiddleware_RowsLeftOpenDoNotKeepItFromCommitting(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for _, size := range shapes {
			for _, how := range []string{"rows", "row"} {
				handler := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize = size }).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					tx, _ := idempotency.TxFromContext(r.Context())
					if err := addNamed(r.Context(), how); err != nil {
						t.Error(err)
					}
					const many = `with recursive n(i) as (select 1 union all select i + 1 from n where i < 1000) select i from n`
					if how == "row" {
						_ = tx.QueryRowContext(r.Context(), many)
					} else if rows, err := tx.QueryContext(r.Context(), many); err != nil || !rows.Next() { //nolint:sqlclosecheck // on purpose
						t.Error(err)
					}
					w.WriteHeader(http.StatusCreated)
				}))
				w := do(t, handler, post("/", "x", withKey(fmt.Sprint(how, size))))
				if n := p.count(t, `select count(*) from effects where name = $1`, how); w.Code != http.StatusCreated || n == 0 {
					t.Errorf("%s, %d: %d %s, %d effects", how, size, w.Code, w.Body, n)
				}
			}
		}
	})
}

// A request that is alone in its group has its whole timeout.
func TestGroup_ALoneRequestIsNotCutShort(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var runs atomic.Int64
		handler := p.engine(t, func(c *idempotency.Config) { c.Transactions.GroupSize, c.Timeout = 50, 20*time.Second }).TxMiddleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			runs.Add(1)
			select {
			case <-time.After(1500 * time.Millisecond):
			case <-r.Context().Done():
			}
		}))
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || runs.Load() != 1 {
			t.Errorf("%d after %d runs", w.Code, runs.Load())
		}
	})
}

// A middleware inside another one of this package passes requests through.
func TestMiddleware_AppliedTwicePasses(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine, other := p.engine(t, nil), p.engine(t, nil)
		pay := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := addNamed(r.Context(), "paid"); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusCreated)
		})
		for i, handler := range []http.Handler{
			engine.TxMiddleware(engine.TxMiddleware(pay)), engine.TxMiddleware(other.Middleware(pay)),
		} {
			for again := range 2 {
				w := do(t, handler, post("/", "x", withKey(fmt.Sprint(i))))
				if w.Code != http.StatusCreated || (w.Header().Get("Idempotency-Replayed") != "") != (again == 1) {
					t.Errorf("%d: %d %s", i, w.Code, w.Body)
				}
			}
		}
		if n := p.count(t, `select count(*) from effects`); n != 2 {
			t.Errorf("%d effects", n)
		}
		expectProblem(t, do(t, engine.Middleware(other.TxMiddleware(pay)), post("/", "x", withKey("wrong"))), http.StatusInternalServerError, "internal")
	})
}

// A form's files are removed with the attempt, as net/http removes those of its request.
func TestMiddleware_LeavesNoFilesOfAForm(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	p := onSQLite(t)
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	file, err := form.CreateFormFile("file", "name")
	if err == nil {
		_, err = file.Write(make([]byte, 100_000))
	}
	if err := errors.Join(err, form.Close()); err != nil {
		t.Fatal(err)
	}
	for name, wrap := range map[string]func(http.Handler) http.Handler{"tx": p.engine(t, nil).TxMiddleware, "snapshot": p.engine(t, nil).Middleware} {
		seen := 0
		handler := wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if err := r.ParseMultipartForm(1); err != nil {
				t.Error(err)
			}
			seen = len(filesIn(t, os.TempDir()))
		}))
		w := httptest.NewRecorder()
		r := post("/", body.String(), withKey(name), func(r *http.Request) { r.Header.Set("Content-Type", form.FormDataContentType()) })
		handler.ServeHTTP(w, r)
		if left := filesIn(t, os.TempDir()); seen == 0 || len(left) != 0 {
			t.Errorf("%s: %d files, then %q", name, seen, left)
		}
	}
}

func filesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "multipart-") {
			names = append(names, e.Name())
		}
	}
	return names
}

// A success is stored however late it is; until then copies get in-progress.
func TestMiddleware_KeepsItsLeaseAndALateSuccess(t *testing.T) {
	onEachStore(t, func(t *testing.T, store idempotency.Store) {
		engine := newEngine(t, struct{ idempotency.Store }{store}, func(c *idempotency.Config) {
			c.Timeout, c.Failures.Lease, c.Failures.Crashed = 2*time.Second, 6*time.Second, idempotency.CrashedTakeOver
			c.Logger = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})) // a renewal that failed
		})
		var running, most, runs atomic.Int64
		work := func() {
			runs.Add(1)
			most.Store(max(most.Load(), running.Add(1)))
			testserver.Pause(t.Context(), 15*time.Second)
			running.Add(-1)
		}
		handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			work()
			_, _ = io.WriteString(w, "done")
		}))
		command := func() (string, error) {
			r, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "a", Key: "a"}, func(context.Context) (string, error) {
				work()
				return "done", nil
			})
			return r.Value, err
		}
		for name, ask := range map[string]func() bool{
			"request": func() bool { w := do(t, handler, post("/", "x")); return w.Body.String() == "done" },
			"command": func() bool { v, err := command(); return err == nil && v == "done" },
		} {
			runs.Store(0)
			most.Store(0)
			ended := make(chan bool, 1)
			send := func() { go func() { ended <- ask() }() }
			send()
			eventually(t, name+" runs", func() bool {
				select {
				case <-ended: // its time was over before it began
					send()
				default:
				}
				return running.Load() == 1
			})
			eventually(t, name+" is done", ask)
			<-ended
			if runs.Load() != 1 || most.Load() != 1 {
				t.Errorf("%s: %d runs, %d at a time", name, runs.Load(), most.Load())
			}
		}
	})
}

// Config.OnCommit is called after each commit of effects, and only then.
func TestTxMiddleware_OnCommitFollowsEachCommit(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	for shape, size := range shapes {
		var commits atomic.Int64
		handler := p.engine(t, func(c *idempotency.Config) {
			c.Keys.Optional, c.Transactions.GroupSize = true, size
			c.OnCommit = func() { commits.Add(1) }
		}).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/refused" {
				w.WriteHeader(http.StatusUnprocessableEntity)
			}
		}))
		for _, c := range []struct {
			what string
			r    *http.Request
			want int64
		}{
			{"a request", post("/", "x", withKey(fmt.Sprint(size))), 1},
			{"its replay", post("/", "x", withKey(fmt.Sprint(size))), 0},
			{"a refused one", post("/refused", "x", withKey(fmt.Sprint("no-", size))), 0},
			{"one without a key", post("/", "x", withoutKey), 1},
			{"a refused one without a key", post("/refused", "x", withoutKey), 0},
		} {
			commits.Store(0)
			if do(t, handler, c.r); commits.Load() != c.want {
				t.Errorf("%s, %s: %d calls, want %d", shape, c.what, commits.Load(), c.want)
			}
		}
	}
}

// A request without a key whose client was told to send it again has had no effect.
func TestTxMiddleware_NothingCommitsAfterItsTime(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		handler := p.engine(t, func(c *idempotency.Config) {
			c.Keys.Optional, c.Timeout = true, 3*time.Second
		}).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := addNamed(r.Context(), "late"); err != nil {
				t.Log(err) // its time was up before
			}
			<-r.Context().Done()
			w.WriteHeader(http.StatusCreated)
		}))
		expectProblem(t, do(t, handler, post("/", "x", withoutKey)), http.StatusServiceUnavailable, "execution-timeout")
		if n := p.count(t, `select count(*) from effects`); n != 0 {
			t.Errorf("%d effects", n)
		}
	})
}

// A transaction whose time ends before its commit has had no effect; its request may be sent
// again.
func TestTxMiddleware_TimeEndsBeforeTheCommit(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	engine := p.engine(t, func(c *idempotency.Config) { c.Timeout, c.Failures.Lease = 4*time.Second, 5*time.Second })
	locker, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer locker.Rollback()
	var once sync.Once
	engine.At(func(point string) {
		if point == "after effect" {
			once.Do(func() { // completing the claim then waits for the lock until the time is up
				if _, err := locker.ExecContext(t.Context(), p.expand(t, `select from {{idempotency}} for update`)); err != nil {
					t.Error(err)
				}
			})
		}
	})
	handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := addNamed(r.Context(), "late"); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
	// The lock also keeps the claim from being released.
	if w := do(t, handler, post("/", "x")); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "execution-timeout") {
		t.Errorf("status %d: %s", w.Code, w.Body)
	}
	if err := locker.Rollback(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the retry runs", func() bool { return do(t, handler, post("/", "x")).Code == http.StatusOK })
	if n := p.count(t, `select count(*) from effects`); n != 1 {
		t.Errorf("%d effects", n)
	}
}
