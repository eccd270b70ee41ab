package idempotency_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"io"
	"log/slog"
	"net/http"
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

// The owner's transaction is healthy, only late: the compare-and-set stops it.
func TestTxMiddleware_ALateOwnerLosesTheCompareAndSet(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(isolation.String(), func(t *testing.T) {
			t.Parallel()
			late, goOn := make(chan struct{}), make(chan struct{})
			slow, engine := p.probe(t, true, func(c *idempotency.Config) {
				c.Transactions.Isolation, c.Timeout, c.Failures.Lease = isolation, time.Minute, 2*time.Minute
			})
			engine.At(func(point string) {
				if point == "after effect" {
					close(late)
					<-goOn
				}
			})
			fast, _ := p.probe(t, true, func(c *idempotency.Config) { c.Transactions.Isolation = isolation })
			q := newRequest()
			var a answer
			var sending sync.WaitGroup
			sending.Go(func() { a, _ = q.send(t.Context(), http.DefaultClient, slow, "of the late owner") })
			<-late
			p.endLeases(t)
			b, err := q.send(t.Context(), http.DefaultClient, fast, "of the taker")
			if err != nil || b.body != "of the taker" {
				t.Errorf("%v %v", b, err)
			}
			close(goOn)
			sending.Wait()
			if a != b {
				t.Errorf("the late owner answered %v", a)
			}
			q.expectOnce(t, p)
		})
	}
}

// endLeases ends the leases of all started claims.
func (p *testDB) endLeases(t *testing.T) {
	t.Helper()
	now := "clock_timestamp()"
	if p.cfg.Dialect == oncemill.SQLite {
		now = "0"
	}
	p.exec(t, `update {{idempotency}} set lease_until = `+now+` where state = 1`)
}

func TestTxMiddleware_DatabaseGone(t *testing.T) {
	t.Parallel()
	pg := testserver.PrivatePostgres(t)
	p := newTestDB(t, &testDB{driver: "postgres", dsn: pg.DSN() + "&binary_parameters=yes", cfg: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	url, engine := p.probe(t, true, func(c *idempotency.Config) { c.Timeout, c.Failures.Lease = shortTimeout, shortLease })
	var crashAt atomic.Pointer[string]
	engine.At(func(point string) {
		if at := crashAt.Load(); at != nil && *at == point {
			crashAt.Store(nil)
			pg.Crash()
		}
	})
	expect503 := func(q request) {
		t.Helper()
		if a, err := q.send(t.Context(), http.DefaultClient, url, "too early"); err != nil || a.status != http.StatusServiceUnavailable {
			t.Errorf("%v %v", a, err)
		}
	}
	for _, point := range []string{"", "after claim", "after effect", "before commit"} {
		q := newRequest()
		if point == "" {
			pg.Crash() // gone at the claim
		} else {
			crashAt.Store(&point)
		}
		expect503(q)
		pg.Start()
		ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
		a, err := q.settle(ctx, http.DefaultClient, func() string { return url }, "then")
		cancel()
		if err != nil || a.body != "then" {
			t.Errorf("gone %q: %v %v", point, a, err)
		}
		q.expectOnce(t, p)
	}
}

// lossy is a driver whose commits lose their answer once, when armed, and that sends the
// statements that innocent hides.
type lossy struct {
	driver driver.Driver
	dsn    string
	armed  atomic.Bool
	unsent atomic.Bool            // a commit never arrives, once, and has no answer
	text   atomic.Pointer[string] // the answer of a statement that contains it is lost once

	asked     func(query string) // called after a query, unless nil
	committed func()             // called after a commit, unless nil
}

// lose loses the answer of a statement that was executed.
func (l *lossy) lose(query string) error {
	text := l.text.Load()
	if text != nil && strings.Contains(query, *text) && l.text.CompareAndSwap(text, nil) {
		return io.ErrUnexpectedEOF
	}
	return nil
}

const hidden = `select 'innocent' -- `

// innocent hides a statement from the filter for statements that end a transaction.
func innocent(text string) string { return hidden + text }

func (l *lossy) Driver() driver.Driver { return l.driver }

func (l *lossy) Connect(context.Context) (driver.Conn, error) {
	conn, err := l.driver.Open(l.dsn)
	if err != nil {
		return nil, err
	}
	return &lossyConn{DriverConn: testserver.DriverConn{Conn: conn}, lossy: l}, nil
}

type lossyConn struct {
	testserver.DriverConn
	lossy *lossy
}

func (c *lossyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	query = strings.TrimPrefix(query, hidden)
	result, err := c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
	if lost := c.lossy.lose(query); err == nil && lost != nil {
		return nil, lost
	}
	return result, err
}

func (c *lossyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, query, args)
	if c.lossy.asked != nil {
		c.lossy.asked(query)
	}
	if lost := c.lossy.lose(query); err == nil && lost != nil {
		_ = rows.Close()
		return nil, lost
	}
	return rows, err
}

func (c *lossyConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	return lossyTx{tx, c.lossy}, err
}

type lossyTx struct {
	driver.Tx
	lossy *lossy
}

func (t lossyTx) Commit() error {
	if t.lossy.unsent.CompareAndSwap(true, false) {
		_ = t.Rollback()
		return driver.ErrBadConn
	}
	err := t.Tx.Commit()
	if err == nil && t.lossy.committed != nil {
		t.lossy.committed()
	}
	if err == nil && t.lossy.armed.CompareAndSwap(true, false) {
		return driver.ErrBadConn
	}
	return err
}

// through returns the same database, seen through a lossy driver.
func (p *testDB) through(t *testing.T) (*testDB, *lossy) {
	t.Helper()
	l := &lossy{driver: p.db.Driver(), dsn: p.dsn}
	q := &testDB{driver: p.driver, dsn: p.dsn, db: sql.OpenDB(l), cfg: p.cfg}
	t.Cleanup(func() { _ = q.db.Close() })
	q.open(t)
	return q, l
}

// The commit has arrived and its answer has not: the row shows the outcome.
func TestTxMiddleware_ALostAnswerOfTheCommitIsLookedUp(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	lost, through := p.through(t)
	for _, size := range shapes {
		url, _ := lost.probe(t, true, func(c *idempotency.Config) {
			c.Transactions.GroupSize, c.Timeout, c.Failures.Lease = size, testserver.MaxWait, 2*testserver.MaxWait
		})
		// A server that is too busy to answer the look-up in time makes the outcome
		// unknown, which is no reason to fail.
		eventually(t, "an outcome is looked up", func() bool {
			q := newRequest()
			through.armed.Store(true)
			a, err := q.send(t.Context(), http.DefaultClient, url, "first")
			found := a == answer{http.StatusCreated, "first"}
			if err != nil || !found && a.status != http.StatusServiceUnavailable || through.armed.Load() {
				t.Errorf("%v %v", a, err)
			}
			b, err := q.send(t.Context(), http.DefaultClient, url, "second")
			if err != nil || b != (answer{http.StatusCreated, "first"}) {
				t.Errorf("then %v %v", b, err)
			}
			q.expectOnce(t, p)
			return found || t.Failed()
		})
	}
}

// The commit never arrives: there is no effect, so nobody is told that there is one.
func TestTxMiddleware_ACommitThatNeverArrivesIsNoSuccess(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	lost, through := p.through(t)
	for shape, size := range shapes {
		engine := lost.engine(t, func(c *idempotency.Config) {
			c.Transactions.GroupSize, c.Timeout, c.Failures.Lease = size, testserver.MaxWait, 2*testserver.MaxWait
		})
		handler := func(arm bool) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				through.unsent.Store(arm)
				if err := addNamed(r.Context(), r.Header.Get("Idempotency-Key")); err != nil {
					t.Error(err)
				}
				w.WriteHeader(http.StatusCreated)
			}
		}
		eventually(t, shape+": a commit of some requests does not arrive", func() bool {
			var keys []string
			for range min(size, 3) {
				keys = append(keys, newRequest().key)
			}
			unknown := 0
			for key, w := range sendTogether(t, engine, keys, handler(true)) {
				if !slices.Contains(keys, key) {
					continue
				}
				effects := 1
				if w.Code == http.StatusServiceUnavailable {
					effects = 0
					unknown++
				} else if w.Code != http.StatusCreated {
					t.Errorf("%s: %d %s", shape, w.Code, w.Body)
				}
				if n := p.count(t, `select count(*) from effects where name = $1`, key); n != effects {
					t.Errorf("%s: %d effects after the answer %d", shape, n, w.Code)
				}
			}
			through.unsent.Store(false)
			p.endLeases(t)
			for _, key := range keys {
				w := do(t, engine.TxMiddleware(handler(false)), post("/", key, withKey(key)))
				if n := p.count(t, `select count(*) from effects where name = $1`, key); w.Code != http.StatusCreated || n != 1 {
					t.Errorf("%s: then %d, %d effects", shape, w.Code, n)
				}
			}
			return unknown == len(keys) || t.Failed()
		})
	}
}

// Without a key nothing can find out what became of a commit, and sent again the request would be another one.
func TestTxMiddleware_AnUnknownCommitWithoutAKeyAsksForNoRetry(t *testing.T) {
	t.Parallel()
	lost, through := onPostgres(t).through(t)
	var log bytes.Buffer
	engine := lost.engine(t, func(c *idempotency.Config) {
		c.Keys.Optional, c.Logger = true, slog.New(slog.NewTextHandler(&log, nil))
	})
	through.armed.Store(true)
	w := do(t, engine.TxMiddleware(ok("paid")), post("/", "x", withoutKey))
	expectProblem(t, w, http.StatusInternalServerError, "internal")
	if w.Header().Get("Retry-After") != "" || !strings.Contains(w.Body.String(), "is not known") || !strings.Contains(log.String(), `level=ERROR msg="outcome of a commit is unknown"`) {
		t.Errorf("answered %v %s, logged %s", w.Header(), w.Body, log.String())
	}
}

// Two handlers read what the other writes: one of them has to run again, and both
// succeed.
func TestTxMiddleware_RunsAgainAfterASerializationFailure(t *testing.T) {
	t.Parallel()
	t.Run("with keys", func(t *testing.T) {
		t.Parallel()
		runAgain(t, func() func(*http.Request) { return withKey(newRequest().key) })
	})
	t.Run("without", func(t *testing.T) {
		t.Parallel()
		runAgain(t, func() func(*http.Request) { return withoutKey })
	})
}

func runAgain(t *testing.T, key func() func(*http.Request)) {
	t.Helper()
	p := onPostgres(t)
	p.exec(t, `create table balance (id int primary key, amount int not null)`)
	p.exec(t, `insert into balance values (1, 0)`)
	engine := p.engine(t, func(c *idempotency.Config) {
		c.Transactions.Isolation, c.Transactions.Retries = sql.LevelSerializable, 1000
		c.Timeout, c.Failures.Lease = testserver.MaxWait, 2*testserver.MaxWait
		c.Keys.Optional = true
	})
	var runs atomic.Int64
	handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		tx, _ := idempotency.TxFromContext(r.Context())
		var amount int
		err := tx.QueryRowContext(r.Context(), `select amount from balance where id = 1`).Scan(&amount)
		if err == nil {
			_, err = tx.ExecContext(r.Context(), `update balance set amount = $1 where id = 1`, amount+1)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusConflict) // what it thinks is not stored
			return
		}
		fmt.Fprint(w, amount+1)
	}))
	const requests = 20
	var sending sync.WaitGroup
	for range requests {
		sending.Go(func() {
			if rec := do(t, handler, post("/", "x", key())); rec.Code != http.StatusOK {
				t.Errorf("status %d: %s", rec.Code, rec.Body)
			}
		})
	}
	sending.Wait()
	if n := p.count(t, `select amount from balance`); n != requests {
		t.Errorf("the balance is %d", n)
	}
	if runs.Load() <= requests {
		t.Error("no conflict happened")
	}
}
