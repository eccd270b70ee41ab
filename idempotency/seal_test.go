package idempotency_test

import (
	"bytes"
	"database/sql"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

// A commit that gets past the handle, here by a driver that sends another statement, is
// refused by the seal: there is no answer without its effects.
func TestTxMiddleware_TheDatabaseRefusesTheEndByTheHandler(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		lossy, _ := p.through(t)
		texts := []string{"commit", "rollback"}
		if p.cfg.Dialect == oncemill.PostgreSQL {
			texts = append(texts, "commit and chain", "rollback and chain")
		}
		for _, text := range texts {
			p.exec(t, `delete from effects`)
			handler := lossy.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				tx, _ := idempotency.TxFromContext(r.Context())
				if _, err := tx.ExecContext(r.Context(), `insert into effects (name) values ('a')`); err != nil {
					t.Error(err)
				}
				_, err := tx.ExecContext(r.Context(), innocent(text))
				if commits := strings.HasPrefix(text, "commit"); commits != (err != nil) {
					t.Errorf("%s: %v", text, err)
				}
				if err != nil {
					_, err = tx.ExecContext(r.Context(), `insert into effects (name) values ('b')`)
					if p.cfg.Dialect == oncemill.PostgreSQL && !errors.Is(err, oncemill.ErrTxOwned) {
						t.Errorf("%s: what follows gets %v", text, err)
					}
				}
				w.WriteHeader(http.StatusCreated)
			}))
			// PostgreSQL gives the transaction up; SQLite goes on with one that it
			// has refused to commit, and its effects commit with its answer after all.
			status, effects, keys := http.StatusInternalServerError, 0, 0
			if p.cfg.Dialect == oncemill.SQLite && text == "commit" {
				status, effects, keys = http.StatusCreated, 2, 1
			}
			for range 2 {
				if w := do(t, handler, post("/", "x", withKey(strings.ReplaceAll(text, " ", "_")))); w.Code != status {
					t.Errorf("%s: got %d %s", text, w.Code, w.Body)
				}
			}
			if n := p.count(t, `select count(*) from effects`); n != effects {
				t.Errorf("%s: %d effects", text, n)
			}
			if n := p.count(t, `select count(*) from {{idempotency}}`); n != keys {
				t.Errorf("%s: %d keys are held", text, n)
			}
			p.exec(t, `delete from {{idempotency}}`)
		}
	})
}

// The log says what the handler has done wrong.
func TestTxMiddleware_TellsOfAnIgnoredError(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	var log bytes.Buffer
	engine := p.engine(t, func(c *idempotency.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	handler := engine.TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		if _, err := tx.ExecContext(r.Context(), `insert into nowhere values (1)`); err == nil {
			t.Error("inserted")
		}
		w.WriteHeader(http.StatusCreated)
	}))
	expectProblem(t, do(t, handler, post("/", "x")), http.StatusInternalServerError, "commit-failed")
	if !strings.Contains(log.String(), "the handler ignored its error") {
		t.Errorf("logged %s", log.String())
	}
}

// A violated foreign key of the service is not taken for the seal.
func TestTxMiddleware_AViolationIsNotTheSeals(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		p.exec(t, `create table orders (id integer primary key)`)
		p.exec(t, `create table lines (order_id integer not null constraint idempotency_seal references orders (id))`)
		handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, _ := idempotency.TxFromContext(r.Context())
			for _, text := range []string{`savepoint s`, `insert into lines values (1)`, `rollback to savepoint s`, `insert into effects (name) values ('a')`} {
				_, err := tx.ExecContext(r.Context(), text)
				if violated := strings.HasPrefix(text, "insert into lines"); violated != (err != nil) || errors.Is(err, oncemill.ErrTxOwned) {
					t.Errorf("%s: %v", text, err)
				}
			}
			w.WriteHeader(http.StatusCreated)
		}))
		if w := do(t, handler, post("/", "x")); w.Code != http.StatusCreated || p.count(t, `select count(*) from effects`) != 1 {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
	})
}

func TestTxMiddleware_TheHandleRefusesTheEnd(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var kept oncemill.Tx
		for _, text := range []string{"commit", "rollback", "/* */ end", "begin", "select 1; commit"} {
			handler := p.engine(t, nil).TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				tx, _ := idempotency.TxFromContext(r.Context())
				kept = tx
				if err := errors.Join(tx.Commit(), tx.Rollback()); !errors.Is(err, oncemill.ErrTxOwned) {
					t.Errorf("got %v", err)
				}
				_, _ = tx.ExecContext(r.Context(), `insert into effects (name) values ('a')`)
				if _, err := tx.ExecContext(r.Context(), text); !errors.Is(err, oncemill.ErrTxOwned) {
					t.Errorf("%s: got %v", text, err)
				}
				w.WriteHeader(http.StatusCreated) // overlooked
			}))
			if w := do(t, handler, post("/", "x", withKey(strings.ReplaceAll(text, " ", "_")))); w.Code != http.StatusInternalServerError && w.Code != http.StatusBadRequest {
				t.Errorf("%s: got %d %s", text, w.Code, w.Body)
			}
		}
		if n := p.count(t, `select count(*) from effects`); n != 0 {
			t.Errorf("%d effects", n)
		}
		if _, err := kept.ExecContext(t.Context(), `select 1`); err == nil {
			t.Error("the handle lives on")
		}
	})
}

// SQLite can refuse the end by a handler only where its foreign keys are on.
func TestTxMiddleware_SQLiteNeedsForeignKeys(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	p.db.SetMaxOpenConns(1)
	runs := 0
	handler := p.engine(t, nil).TxMiddleware(counted(&runs))
	p.exec(t, `pragma foreign_keys = off`)
	expectProblem(t, do(t, handler, post("/", "x")), http.StatusServiceUnavailable, "store-unavailable")
	if runs != 0 {
		t.Error("it ran without a seal")
	}
	p.exec(t, `pragma foreign_keys = on`)
	if w := do(t, handler, post("/", "x")); w.Code != http.StatusOK || runs != 1 {
		t.Errorf("then %d after %d runs", w.Code, runs)
	}
}

// The statement that finishes a request leaves nothing behind in the seal's table.
func TestTxMiddleware_TheSealLeavesNoRows(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelSerializable} {
		p := onPostgres(t)
		handler := p.engine(t, func(c *idempotency.Config) { c.Transactions.Isolation = level }).TxMiddleware(ok("x"))
		for i := range 5 {
			do(t, handler, post("/", "x", withKey(string(rune('a'+i)))))
		}
		if n := p.count(t, `select count(*) from {{idempotency_open}}`); n != 0 {
			t.Errorf("%d rows", n)
		}
	}
}
