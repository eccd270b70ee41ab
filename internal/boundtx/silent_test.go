package boundtx_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/testserver"
)

// The context of a transaction ends while the server is silent and no bounded statement
// runs. Its connection leaves the pool.
func TestTx_SilentServerFreesConnectionsOfIdleTransactions(t *testing.T) {
	t.Parallel()
	for name, meet := range map[string]func(t *testing.T, f *fixture){
		"handler": func(t *testing.T, f *fixture) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tx := f.begin(ctx, t)
			defer time.AfterFunc(300*time.Millisecond, cancel).Stop()
			f.proxy.Silence(nil, 0)
			<-ctx.Done()
			tx.Rollback()
		},
		"rows": func(t *testing.T, f *fixture) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tx := f.begin(ctx, t)
			rows, err := boundtx.Wait(ctx, tx, func() (*sql.Rows, error) {
				return tx.Raw.QueryContext(ctx, `select repeat('x', 100000) from generate_series(1, 1000)`)
			})
			if err != nil {
				t.Fatal(err)
			}
			defer rows.Close()
			f.proxy.Silence(nil, 0)
			silent := time.AfterFunc(time.Second, cancel)
			defer silent.Stop()
			for rows.Next() { // until the connection is closed
				silent.Reset(time.Second) // what was on its way still comes
			}
			if rows.Err() == nil {
				t.Error("a silent server has sent all rows")
			}
			if !tx.Unanswered(rows.Err()) || tx.Unanswered(errors.New("refused")) {
				t.Errorf("the statement is at fault: %v", rows.Err())
			}
			tx.Rollback()
		},
		"statement": func(t *testing.T, f *fixture) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tx := f.begin(ctx, t)
			defer time.AfterFunc(time.Second, cancel).Stop()
			f.proxy.Silence(nil, 0)
			_, err := tx.Raw.ExecContext(ctx, `select 1`)
			if !tx.Unanswered(err) {
				t.Errorf("the statement is at fault: %v", err)
			}
			tx.Rollback()
		},
		"short": func(t *testing.T, f *fixture) {
			_, err := bounded.Do(t.Context(), f.calls, 300*time.Millisecond, func(ctx context.Context) (struct{}, error) {
				return struct{}{}, shorttx.Run(ctx, f.db, shorttx.For(time.Second), func(*sql.Tx) error {
					f.proxy.Silence(nil, 0)
					<-ctx.Done()
					return ctx.Err()
				})
			})
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.db.SetMaxOpenConns(1)
			meet(t, f)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := f.db.PingContext(ctx); err != nil {
				t.Errorf("the pool is exhausted: %v", err)
			}
			f.proxy.Cut()
		})
	}
}

// A silent server costs ten seconds also after a wait for a full pool.
func TestBegin_AbandonsASilentConnectionOfAFullPool(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.db.SetMaxOpenConns(2)
	held, other := f.begin(t.Context(), t), f.begin(t.Context(), t)
	f.proxy.Silence(statement("begin"), 2)
	done := make(chan error, 1)
	go func() {
		tx, err := boundtx.Begin(t.Context(), f.db, oncemill.PostgreSQL, f.calls, nil)
		if err == nil {
			tx.Rollback()
		}
		done <- err
	}()
	testserver.Eventually(t, "it waits for a connection", func() bool { return f.db.Stats().WaitCount > 0 })
	if err := other.Commit(time.Minute); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, bounded.ErrAbandoned) {
			t.Errorf("got %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("Begin does not return")
		f.proxy.Cut()
		<-done
	}
	held.Rollback()
	testserver.Eventually(t, "no connection is in use", func() bool { return f.db.Stats().InUse == 0 })
}
