package boundtx_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/testserver"
)

// Whatever the connections do, and however small the pool, the reported outcome of a
// transaction is right, and every connection returns.
func TestTx_ReportsTheRightOutcomeInAStorm(t *testing.T) {
	t.Parallel()
	rounds := 200
	if n, err := strconv.Atoi(os.Getenv("ONCEMILL_STORM")); err == nil {
		rounds = n
	}
	for _, size := range []int{1, 2, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.db.SetMaxOpenConns(size)
			storm := make(chan struct{})
			var weather sync.WaitGroup
			weather.Go(func() { f.storm(storm) })

			var mu sync.Mutex
			committed, absent, unknown := map[int]bool{}, map[int]bool{}, 0
			var all sync.WaitGroup
			for worker := range 2 * size {
				all.Go(func() {
					for round := range rounds {
						n := worker*rounds + round
						err := f.insert(t.Context(), n, round%3 == 0)
						mu.Lock()
						switch {
						case err == nil:
							committed[n] = true
						case errors.Is(err, boundtx.ErrUnknown):
							unknown++
						default:
							absent[n] = true
						}
						mu.Unlock()
					}
				})
			}
			all.Wait()
			close(storm)
			weather.Wait()
			f.proxy.Resume()

			<-f.calls.Idle()
			testserver.Eventually(t, "no connection is in use", func() bool { return f.db.Stats().InUse == 0 })
			if err := f.insert(t.Context(), -1, false); err != nil {
				t.Errorf("after the storm: %v", err)
			}
			f.proxy.Cut()
			f.expectNumbers(t, committed, absent)
			t.Logf("%d committed, %d did not, %d unknown", len(committed), len(absent), unknown)
			if len(committed) == 0 || len(absent) == 0 {
				t.Error("there was no storm, or nothing else")
			}
		})
	}
}

// storm silences, resumes and cuts connections at random until the channel is closed.
func (f *fixture) storm(over chan struct{}) {
	for {
		for _, do := range []func(){
			func() {
				f.proxy.Silence(statement([]string{"begin", "insert", "commit", "select"}[rand.IntN(4)]), 1+rand.IntN(3))
			},
			func() { f.proxy.Silence(nil, 0) },
			f.proxy.Resume,
			f.proxy.Cut,
		} {
			if rand.IntN(3) == 0 {
				do()
			}
		}
		select {
		case <-over:
			return
		case <-time.After(time.Duration(rand.IntN(300)) * time.Millisecond):
		}
	}
}

// insert inserts n in a transaction that may have little time, lose its context or its
// handler, or roll back. If short, it uses shorttx.
func (f *fixture) insert(ctx context.Context, n int, short bool) error {
	if n >= 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(1+rand.IntN(400))*time.Millisecond)
		defer cancel()
	}
	if short {
		_, err := bounded.Do(ctx, f.calls, time.Second, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, shorttx.Run(ctx, f.db, shorttx.For(time.Second), func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `insert into t values ($1)`, n)
				return err
			})
		})
		if err != nil {
			return errors.Join(boundtx.ErrUnknown, err) // shorttx does not distinguish them
		}
		return nil
	}
	tx, err := boundtx.Begin(ctx, f.db, oncemill.PostgreSQL, f.calls, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := boundtx.Do(ctx, tx, time.Second, func(ctx context.Context) (sql.Result, error) {
		return tx.Raw.ExecContext(ctx, `insert into t values ($1)`, n)
	}); err != nil {
		return err
	}
	if n > 0 && n%7 == 0 {
		return errors.New("the handler fails")
	}
	return tx.Commit(300 * time.Millisecond)
}

// expectNumbers waits for transactions that have written, then expects every number of one
// set in the table and none of the other.
func (f *fixture) expectNumbers(t *testing.T, there, absent map[int]bool) {
	t.Helper()
	if _, err := f.direct.ExecContext(t.Context(), `alter table t add if not exists m int`); err != nil {
		t.Fatal(err)
	}
	rows, err := f.direct.QueryContext(t.Context(), `select n from t`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	found := 0
	for rows.Next() {
		var n int
		if err := rows.Scan(&n); err != nil {
			t.Fatal(err)
		}
		if absent[n] {
			t.Errorf("%d is in the table, but its transaction reported a rollback", n)
		}
		if there[n] {
			found++
		}
	}
	if err := rows.Err(); err != nil || found != len(there) {
		t.Errorf("%d of %d committed numbers are in the table, %v", found, len(there), err)
	}
}

// The context of a transaction may end after the driver has its connection and before the
// line has it.
func TestLine_LostBeforeItsConnectionGetsNone(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	line := new(bounded.Line)
	line.Lose()
	if tx, err := line.BeginTx(t.Context(), f.db, nil); !errors.Is(err, context.Canceled) {
		if err == nil {
			_ = tx.Rollback()
		}
		t.Errorf("got %v", err)
	}
	if n := f.db.Stats().InUse; n != 0 {
		t.Errorf("%d connections are in use", n)
	}
}
