package pgxtx_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/pgxtx"
)

// What a handler leaves open costs nothing, though the pool has one connection.
func TestTx_RowsAndBatchesLeftOpenHoldNothingUp(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		p.db.SetMaxOpenConns(1)
		for _, id := range []string{"a", "b"} {
			err := p.handle(t, id, func(ctx context.Context, tx *pgxtx.Tx) error {
				rows, err := tx.Query(ctx, `select i from generate_series(1, 10000) i`)
				if err != nil {
					return err
				}
				rows.Next()
				var batch pgx.Batch
				for range 3 {
					batch.Queue(`select i from generate_series(1, 1000) i`)
				}
				results := tx.SendBatch(ctx, &batch)
				if _, err := results.Query(); err != nil {
					return err
				}
				return writes["exec"](ctx, tx, id)
			})
			if err != nil {
				t.Error(err)
			}
		}
		p.expectEffects(t, "a", "b")
	})
}

// A statement that runs when the handler's time is over, or its own, is canceled.
func TestTx_StatementsEndWithTheirContexts(t *testing.T) {
	slow := `select pg_sleep(600)`
	onEachBlock(t, func(t *testing.T, p *testDB) {
		for name, send := range sends {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			err := p.run(ctx, name, func(ctx context.Context) error {
				tx, err := pgxtx.FromContext(ctx)
				if err != nil {
					return err
				}
				if err := send(t.Context(), tx, slow); err == nil { // under a context that does not end
					t.Errorf("%s: the statement succeeded", name)
				}
				return nil
			})
			cancel()
			if err == nil || time.Since(began) > 20*time.Second {
				t.Errorf("%s: %v after %v", name, err, time.Since(began))
			}
			err = p.handle(t, name+" alone", func(ctx context.Context, tx *pgxtx.Tx) error {
				if err := writes["exec"](ctx, tx, "before"); err != nil {
					return err
				}
				p.sent.take()
				short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
				defer cancel()
				if err := send(short, tx, slow); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s: %v", name, err)
				}
				if len(p.sent.take()) == 0 {
					return errUndo // its time was over before; the connection is as it was
				}
				return nil
			})
			if err == nil {
				t.Errorf("%s: an attempt without its connection succeeded", name)
			}
		}
		p.expectEffects(t)
		testserver.Eventually(t, "all connections are given back", func() bool { return p.db.Stats().InUse == 0 })
	})
}

func TestTx_AnswersWhenTheServerFallsSilent(t *testing.T) {
	onEachBlock(t, func(t *testing.T, p *testDB) {
		proxy := p.behindProxy(t)
		for name, write := range writes {
			proxy.Silence(testserver.Containing("effects"), 1)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			began := time.Now()
			err := p.run(ctx, name, func(ctx context.Context) error {
				tx, err := pgxtx.FromContext(ctx)
				if err != nil {
					return err
				}
				return write(ctx, tx, name)
			})
			cancel()
			if err == nil || time.Since(began) > 20*time.Second {
				t.Errorf("%s: %v after %v", name, err, time.Since(began))
			}
			proxy.Cut()
		}
		p.expectEffects(t)
		testserver.Eventually(t, "all connections are given back", func() bool { return p.db.Stats().InUse == 0 })
	})
}

// All idle connections lead to a server that is frozen, as after a failover. New ones reach the one
// that has replaced it. pgx pings an idle connection before it is used, which has no answer either.
func TestTx_SilentIdleConnectionsAreReplaced(t *testing.T) {
	t.Parallel()
	const idle = 8
	p := newTestDB(t)
	withInbox(t, p)
	proxy := p.behindProxy(t, stdlib.OptionShouldPing(func(context.Context, stdlib.ShouldPingParams) bool { return true }))
	p.db.SetMaxIdleConns(idle)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	handle := func(id string) error {
		return p.run(ctx, id, func(ctx context.Context) error {
			tx, err := pgxtx.FromContext(ctx)
			if err != nil {
				return err
			}
			return writes["exec"](ctx, tx, id)
		})
	}
	if err := handle("a"); err != nil { // it knows what is paused now
		t.Fatal(err)
	}
	var conns []*sql.Conn
	for range idle {
		conn, err := p.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		_ = conn.Close() // to the pool
	}
	proxy.Silence(nil, 0) // the connections that there are
	if err := handle("b"); err != nil {
		t.Error(err)
	}
	p.expectEffects(t, "a", "b")
	if n := p.db.Stats().OpenConnections; n >= idle {
		t.Errorf("%d connections are open", n)
	}
}

// The server falls silent during a statement whose context never ends, which the handler
// made with its oncemill.Tx. The connection gets its place in the pool back.
func TestTx_AStatementWithoutALimitKeepsNoConnection(t *testing.T) {
	const large = `select repeat('x', 100000) from generate_series(1, 100000)`
	onEachBlock(t, func(t *testing.T, p *testDB) {
		proxy := p.behindProxy(t)
		p.db.SetMaxOpenConns(1)
		unlimited := context.WithoutCancel(t.Context())
		for name, meet := range map[string]func(tx oncemill.Tx) error{
			"rows": func(tx oncemill.Tx) error {
				rows, err := tx.QueryContext(unlimited, large)
				if err != nil {
					return err
				}
				defer rows.Close() //nolint:errcheck // it is cut off
				proxy.Silence(nil, 0)
				for rows.Next() { // until the connection is closed
				}
				return rows.Err()
			},
			"rows left open": func(tx oncemill.Tx) error {
				rows, err := tx.QueryContext(unlimited, large) //nolint:sqlclosecheck // the handler's mistake
				if err != nil {
					return err
				}
				rows.Next()
				proxy.Silence(nil, 0)
				return rows.Err()
			},
			"exec": func(tx oncemill.Tx) error {
				proxy.Silence(nil, 0)
				_, err := tx.ExecContext(unlimited, `insert into effects (name) values ('silent')`)
				return err
			},
			"prepared": func(tx oncemill.Tx) error {
				stmt, err := tx.PrepareContext(unlimited, `insert into effects (name) values ($1)`)
				if err != nil {
					return err
				}
				proxy.Silence(nil, 0)
				_, err = stmt.ExecContext(unlimited, "silent")
				return err
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := p.run(ctx, name, func(ctx context.Context) error {
				tx, _ := oncemill.TxFromContext(ctx)
				return meet(tx)
			})
			cancel()
			if err == nil {
				t.Errorf("%s: handled by a silent server", name)
			}
			testserver.Eventually(t, "the connection is given back after "+name, func() bool { return p.db.Stats().InUse == 0 })
			if err := p.handle(t, name+" after", func(ctx context.Context, tx *pgxtx.Tx) error { return writes["exec"](ctx, tx, name) }); err != nil {
				t.Errorf("%s: then %v", name, err)
			}
			proxy.Cut()
		}
		p.expectEffects(t, "exec", "prepared", "rows", "rows left open")
	})
}
