package idempotency_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

// behindProxy returns a database whose store connects through a proxy.
func (p *testDB) behindProxy(t *testing.T) (*testDB, *testserver.PostgresProxy) {
	t.Helper()
	proxy, dsn := testserver.NewPostgresProxy(t, p.dsn)
	db, err := sql.Open(p.driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		proxy.Cut()
		// What was abandoned gives its connection back.
		eventually(t, "all connections are given back", func() bool { return db.Stats().InUse == 0 })
		_ = db.Close()
	})
	behind := *p
	behind.db = db
	behind.open(t)
	return &behind, proxy
}

// A server stops answering at each step of a request. The request is still answered, and
// its retry runs or finds the answer. One that meets silence at BEGIN runs on another
// connection.
func TestTxMiddleware_AnswersWhenTheServerFallsSilent(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"claim", "begin", "effect", "complete", "commit"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			direct := onPostgres(t)
			p, proxy := direct.behindProxy(t)
			timeout := 2 * time.Second
			if step == "commit" || step == "begin" {
				timeout = time.Minute // the server ends a transaction in which nothing is sent for as long
			}
			url, _ := p.probe(t, true, func(c *idempotency.Config) { c.Timeout, c.Failures.Lease = timeout, 2*timeout })
			text := map[string]string{
				"claim": "idempotency_claim", "begin": "begin isolation", "effect": "insert into effects", "complete": "idempotency_finish", "commit": "commit",
			}[step]
			before, q := newRequest(), newRequest()
			if a, err := before.send(t.Context(), http.DefaultClient, url, "before"); err != nil || a.status >= 300 {
				t.Fatalf("%v %v", a, err)
			}
			proxy.Silence(testserver.Containing(text), 1)
			a, err := q.send(t.Context(), http.DefaultClient, url, "first")
			if err != nil || (a.status < 500) != (step == "begin") {
				t.Errorf("the request that met silence: %v %v", a, err)
			}
			if n := proxy.Silenced(); n != 1 {
				t.Errorf("%d connections were silenced", n)
			}
			if step == "commit" {
				proxy.Resume() // the commit arrives
			} else {
				proxy.Cut()
			}
			eventually(t, "it succeeds when it is sent again", func() bool {
				a, err = q.send(t.Context(), http.DefaultClient, url, "again")
				return err == nil && a.status < 300
			})
			if step == "commit" && a.body != "first" {
				t.Errorf("the stored answer is %v", a)
			}
			q.expectOnce(t, direct)
		})
	}
}

func TestEngine_AbandonsWhatHasNoDeadlineOfItsOwn(t *testing.T) {
	t.Parallel()
	direct := onPostgres(t)
	p, proxy := direct.behindProxy(t)
	engine := p.engine(t, func(c *idempotency.Config) { c.Answers.StatusPath = "/status/" })

	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	proxy.Silence(testserver.Containing("idempotency_find"), 1)
	w := httptest.NewRecorder()
	path := "/status/" + strings.Repeat("A", 43)
	engine.StatusHandler().ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil))
	if w.Code != http.StatusServiceUnavailable {
		t.Errorf("a status lookup that met silence answered %d", w.Code)
	}

	proxy.Silence(testserver.Containing("delete from"), 1)
	if _, err := engine.Purge(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a purge that met silence: %v", err)
	}
	if _, err := engine.Purge(t.Context()); err != nil {
		t.Errorf("the next one: %v", err)
	}
}

// A claim that met silence arrives when its request has been answered. Nothing has run under
// it: a retry runs at once, in both modes, and not after the lease or never.
func TestMiddleware_AClaimThatArrivesLateHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for _, transactional := range []bool{true, false} {
		direct := onPostgres(t)
		p, proxy := direct.behindProxy(t)
		url, _ := p.probe(t, transactional, func(c *idempotency.Config) { c.Timeout, c.Failures.Lease = 2*time.Second, time.Hour })
		before, q := newRequest(), newRequest()
		if a, err := before.send(t.Context(), http.DefaultClient, url, "before"); err != nil || a.status >= 300 {
			t.Fatalf("%v %v", a, err)
		}
		proxy.Silence(testserver.Containing("idempotency_claim"), 1)
		if a, err := q.send(t.Context(), http.DefaultClient, url, "first"); err != nil || a.status != http.StatusServiceUnavailable {
			t.Errorf("the request that met silence: %v %v", a, err)
		}
		proxy.Resume()
		eventually(t, "the claim has arrived", func() bool { return p.count(t, `select count(*) from {{idempotency}}`) == 2 })
		if a, err := q.send(t.Context(), http.DefaultClient, url, "again"); err != nil || a.status >= 300 {
			t.Errorf("transactional %v, sent again: %v %v", transactional, a, err)
		}
		q.expectOnce(t, direct)
	}
}
