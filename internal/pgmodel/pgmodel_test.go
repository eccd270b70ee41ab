package pgmodel_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/oncemill/oncemill/internal/pgmodel"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// add writes a row unless it exists, and take locks one.
const add, take = "add", "take"

func newServer(t *testing.T) (*pgmodel.Server, *sql.DB) {
	t.Helper()
	s := pgmodel.New(pgmodel.Config{Statements: map[string]pgmodel.Statement{
		add: func(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
			name, _ := args[0].(string)
			if err := tx.Lock("t", name); err != nil || tx.Get("t", name) != nil {
				return nil, err
			}
			tx.Put("t", name, true)
			return [][]driver.Value{{}}, nil
		},
		take: func(tx *pgmodel.Tx, args []any) ([][]driver.Value, error) {
			name, _ := args[0].(string)
			return nil, tx.Lock("t", name)
		},
	}})
	return s, s.DB()
}

// in runs f in a transaction of a process, in a goroutine, and returns where its error comes.
func in(t *testing.T, db *sql.DB, process int, f func(ctx context.Context, tx *sql.Tx) error) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	ctx := pgmodel.WithActor(t.Context(), pgmodel.Actor{Process: process})
	go func() {
		tx, err := db.BeginTx(ctx, nil)
		if err == nil {
			defer tx.Rollback()
			err = f(ctx, tx)
		}
		done <- err
	}()
	return done
}

// settle lets the server work until nothing waits but for locks.
func settle(s *pgmodel.Server, rng *rand.Rand) {
	for {
		synctest.Wait()
		if all, locked := s.Waiting(); all == locked || !s.Next(rng, false) {
			return
		}
	}
}

func TestServer_AnInsertWaitsForTheOneBeforeIt(t *testing.T) {
	for name, commits := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, db := newServer(t)
				defer db.Close()
				rng, end := rand.New(rand.NewPCG(1, 1)), make(chan struct{})
				insert := func(then func(tx *sql.Tx) error) func(context.Context, *sql.Tx) error {
					return func(ctx context.Context, tx *sql.Tx) error {
						result, err := tx.ExecContext(ctx, add, "a")
						if err != nil {
							return err
						}
						if n, _ := result.RowsAffected(); n == 0 {
							return sql.ErrNoRows
						}
						return then(tx)
					}
				}
				first := in(t, db, 1, insert(func(tx *sql.Tx) error {
					<-end
					if commits {
						return tx.Commit()
					}
					return nil
				}))
				settle(s, rng)
				second := in(t, db, 2, insert(func(tx *sql.Tx) error { return tx.Commit() }))
				settle(s, rng)
				if _, locked := s.Waiting(); locked != 1 {
					t.Errorf("%d calls wait for a lock", locked)
				}
				close(end)
				settle(s, rng)
				if err := <-first; err != nil {
					t.Errorf("first: %v", err)
				}
				if err := <-second; errors.Is(err, sql.ErrNoRows) != commits {
					t.Errorf("second: %v", err)
				}
				if n := len(s.Committed("t")); n != 1 {
					t.Errorf("%d rows", n)
				}
			})
		})
	}
}

func TestServer_FindsADeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, db := newServer(t)
		defer db.Close()
		rng, both := rand.New(rand.NewPCG(1, 1)), make(chan struct{})
		lock := func(one, other string) func(context.Context, *sql.Tx) error {
			return func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, take, one)
				<-both
				if err == nil {
					_, err = tx.ExecContext(ctx, take, other)
				}
				return err
			}
		}
		first, second := in(t, db, 1, lock("a", "b")), in(t, db, 2, lock("b", "a"))
		settle(s, rng)
		close(both)
		settle(s, rng)
		one, other := <-first, <-second
		if (sqlerr.State(one) == "40P01") == (sqlerr.State(other) == "40P01") || one != nil && other != nil {
			t.Errorf("got %v and %v", one, other)
		}
	})
}

// What a process that dies has locked stays locked until the server notices, and what it was
// committing is committed or not.
func TestServer_ACrashLeavesLocksAndUnknownCommits(t *testing.T) {
	committed := 0
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			s, db := newServer(t)
			defer db.Close()
			rng := rand.New(rand.NewPCG(seed, 1))
			dying := in(t, db, 1, func(ctx context.Context, tx *sql.Tx) error {
				if _, err := tx.ExecContext(ctx, add, "a"); err != nil {
					return err
				}
				return tx.Commit()
			})
			synctest.Wait()
			s.Next(rng, false) // the insert
			synctest.Wait()
			s.Crash(rng, 1)
			if err := <-dying; !errors.Is(err, io.ErrUnexpectedEOF) || !sqlerr.CommitUnknown(err) {
				t.Errorf("got %v", err)
			}
			if len(s.Committed("t")) == 1 {
				committed++
				return
			}
			if s.Open() != 1 {
				t.Errorf("%d transactions are open", s.Open())
			}
			if !s.Next(rng, false) || s.Open() != 0 {
				t.Error("the server has not noticed")
			}
		})
	}
	if committed == 0 || committed == 20 {
		t.Errorf("%d of 20 were committed", committed)
	}
}
