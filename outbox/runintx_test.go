package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestRunInTx_CommitsAndWakes(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		wake, stop := p.queue.Listen()
		defer stop()
		err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			if carried, ok := oncemill.TxFromContext(ctx); !ok || carried != oncemill.Tx(tx) {
				t.Error("the context does not carry the transaction")
			}
			expectNoWake(t, wake, "before the commit")
			return p.box.Publisher(tx).Publish("orders", newMessage("a", "k"))
		})
		expectNoError(t, err)
		expectWake(t, wake)
		expectNoWake(t, wake, "twice")
		expectIDs(t, p.read(t), "a")
	})
}

func TestRunInTx_AnErrorRollsBack(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		wake, stop := p.queue.Listen()
		defer stop()
		no, runs := errors.New("no"), 0
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			runs++
			if err := p.box.Publisher(tx).Publish("orders", newMessage("a", "k")); err != nil {
				return err
			}
			return no
		})
		if err != no || runs != 1 { //nolint:errorlint // the very error of the function
			t.Errorf("%d runs, %v", runs, err)
		}
		expectNoWake(t, wake, "after a rollback")
		expectIDs(t, p.read(t))
	})
}

func TestRunInTx_APanicRollsBackAndGoesOn(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.db.SetMaxOpenConns(1) // so that a connection that is not given back shows
		ends := map[string]func(){"panic": func() { panic("no") }, "goexit": runtime.Goexit}
		for name, end := range ends {
			var recovered any
			var done sync.WaitGroup
			done.Go(func() {
				defer func() { recovered = recover() }()
				_ = p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
					if err := p.box.Publisher(tx).Publish("orders", newMessage(name, "")); err != nil {
						t.Error(err)
					}
					end()
					return nil
				})
			})
			done.Wait()
			if name == "panic" && recovered != "no" {
				t.Errorf("recovered %v", recovered)
			}
			expectIDs(t, p.read(t))
		}
	})
}

// serializationFailure is what a driver makes of 40001.
func serializationFailure() error {
	return fmt.Errorf("reserve stock: %w", &pq.Error{Code: "40001", Message: "could not serialize access"})
}

func TestRunInTx_GivesUpAfterTheRetries(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Retries = 3 })
		wake, stop := p.queue.Listen()
		defer stop()
		runs := 0
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			runs++
			return errors.Join(p.box.Publisher(tx).Publish("orders", newMessage("a", "")), serializationFailure())
		})
		var state *pq.Error
		if !errors.As(err, &state) || state.Code != "40001" || runs != 4 {
			t.Errorf("%d runs, %v", runs, err)
		}
		expectNoWake(t, wake, "after a failure")
		expectIDs(t, p.read(t))
	})
}

func TestRunInTx_LeavesNothingOfTheAttemptsThatFailed(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		runs := 0
		err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			runs++
			if err := p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint("attempt ", runs), "")); err != nil {
				return err
			}
			if runs < 4 {
				return serializationFailure()
			}
			return nil
		})
		expectNoError(t, err)
		expectIDs(t, p.read(t), "attempt 4")
	})
}

func TestRunInTx_StopsRetryingWithTheContext(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Retries = 1 << 30 })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		runs := 0
		err := p.box.RunInTx(ctx, func(context.Context, *sql.Tx) error {
			if runs++; runs == 3 {
				cancel()
			}
			return serializationFailure()
		})
		if err == nil || runs != 3 {
			t.Errorf("%d runs, %v", runs, err)
		}
	})
}

func TestRunInTx_AContextThatEndsBeforeTheCommitIsADefiniteFailure(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		err := p.box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
			err := p.box.Publisher(tx).Publish("orders", newMessage("a", ""))
			cancel()
			return err
		})
		expectError(t, err, context.Canceled)
		if errors.Is(err, outbox.ErrCommitUnknown) {
			t.Errorf("reported as unknown: %v", err)
		}
		expectIDs(t, p.read(t))
	})
}

// A first attempt whose snapshot is older than another's commit.
func TestRunInTx_RetriesASerializationFailureOfAStatement(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			p := onPostgres(t, "binary_parameters=yes", "default_transaction_isolation="+level)
			p.exec(t, `create table stock (id int primary key, quantity int not null)`)
			p.exec(t, `insert into stock values (1, 10)`)
			runs := 0
			err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				runs++
				var quantity int
				if err := tx.QueryRowContext(ctx, `select quantity from stock where id = 1`).Scan(&quantity); err != nil {
					return err
				}
				if runs == 1 {
					p.exec(t, `update stock set quantity = quantity - 3`) // on another connection
				}
				if _, err := tx.ExecContext(ctx, `update stock set quantity = $1`, quantity-1); err != nil {
					return fmt.Errorf("take from stock: %w", err)
				}
				return p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint("run ", runs), ""))
			})
			expectNoError(t, err)
			if got := p.count(t, `select quantity from stock`); got != 6 || runs != 2 {
				t.Errorf("the quantity is %d after %d runs", got, runs)
			}
			expectIDs(t, p.read(t), "run 2")
		})
	}
}

// SERIALIZABLE may find out only when it commits: two transactions that have
// each read what the other writes.
func TestRunInTx_RetriesASerializationFailureOfTheCommit(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes", "default_transaction_isolation=serializable")
	p.exec(t, `create table duty (doctor text primary key, on_call bool not null)`)
	p.exec(t, `insert into duty values ('a', true), ('b', true)`)
	leave := func(ctx context.Context, tx *sql.Tx, doctor string) error {
		var others int
		if err := tx.QueryRowContext(ctx, `select count(*) from duty where on_call and doctor <> $1`, doctor).Scan(&others); err != nil {
			return err
		}
		if others == 0 {
			return nil // must stay
		}
		_, err := tx.ExecContext(ctx, `update duty set on_call = false where doctor = $1`, doctor)
		return err
	}
	runs := 0
	err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		runs++
		if err := errors.Join(leave(ctx, tx, "a"), p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint("run ", runs), ""))); err != nil {
			return err
		}
		if runs == 1 {
			p.inTx(t, func(other *sql.Tx) { expectNoError(t, leave(ctx, other, "b")) })
		}
		return nil
	})
	expectNoError(t, err)
	if n := p.count(t, `select count(*) from duty where on_call`); n != 1 || runs != 2 {
		t.Errorf("%d on call after %d runs", n, runs)
	}
	expectIDs(t, p.read(t), "run 2")
}

func TestRunInTx_RetriesADeadlock(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `create table stock (id int primary key, quantity int not null)`)
	p.exec(t, `insert into stock values (1, 10), (2, 10)`)
	other, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback()
	take := func(tx *sql.Tx, id int) error {
		_, err := tx.ExecContext(t.Context(), `update stock set quantity = quantity - 1 where id = $1`, id)
		return err
	}
	// The one that looks for deadlocks first is the victim.
	if _, err := other.ExecContext(t.Context(), `set local deadlock_timeout = '60s'`); err != nil {
		t.Fatal(err)
	}
	expectNoError(t, take(other, 2))
	var crossing sync.WaitGroup
	runs := 0
	err = p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		runs++
		if _, err := tx.ExecContext(ctx, `set local deadlock_timeout = '5ms'`); err != nil {
			return err
		}
		if err := p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint("run ", runs), "")); err != nil {
			return err
		}
		crossing.Wait() // in the second run: else it might take the row back before the other has woken up
		if err := take(tx, 1); err != nil {
			return err
		}
		if runs == 1 {
			crossing.Go(func() {
				expectNoError(t, take(other, 1))
				expectNoError(t, other.Commit())
			})
			eventually(t, "the other transaction waits for this one", func() bool {
				return p.count(t, `select count(*) from pg_locks where not granted and locktype = 'transactionid'
					and transactionid = (select transactionid from pg_locks where pid = $1 and locktype = 'transactionid' and granted)`, backend(t, tx)) == 1
			})
		}
		return take(tx, 2)
	})
	expectNoError(t, err)
	if n := p.count(t, `select sum(quantity) from stock`); n != 16 || runs != 2 {
		t.Errorf("the sum is %d after %d runs", n, runs)
	}
	expectIDs(t, p.read(t), "run 2")
}

func backend(t *testing.T, tx *sql.Tx) (pid int) {
	t.Helper()
	if err := tx.QueryRowContext(t.Context(), `select pg_backend_pid()`).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestRunInTx_ManyAtOnceAllSucceed(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes", "default_transaction_isolation=serializable")
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.Retries = 1000 })
	p.exec(t, `create table counter (n int not null)`)
	p.exec(t, `insert into counter values (0)`)
	const writers, each = 8, 10
	var running sync.WaitGroup
	for w := range writers {
		running.Go(func() {
			for i := range each {
				err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
					var n int
					if err := tx.QueryRowContext(ctx, `select n from counter`).Scan(&n); err != nil {
						return err
					}
					if _, err := tx.ExecContext(ctx, `update counter set n = $1`, n+1); err != nil {
						return err
					}
					return p.box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint(w, "-", i), "k"))
				})
				expectNoError(t, err)
			}
		})
	}
	running.Wait()
	if n, rows := p.count(t, `select n from counter`), len(p.read(t)); n != writers*each || rows != writers*each {
		t.Errorf("counter %d, rows %d, want %d", n, rows, writers*each)
	}
}

// A transaction that was begun by hand has no turn that RunInTx could wait for.
func TestRunInTx_WaitsForATransactionThatWasBegunByHand(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	holder, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var released sync.WaitGroup
	released.Go(func() {
		testserver.Pause(t.Context(), 30*time.Millisecond)
		expectNoError(t, holder.Rollback())
	})
	p.publish(t, newMessage("a", ""))
	released.Wait()
	expectIDs(t, p.read(t), "a")
}

func expectWake(t *testing.T, wake <-chan struct{}) {
	t.Helper()
	select {
	case <-wake:
	case <-time.After(testserver.MaxWait):
		t.Error("nobody was woken")
	}
}

func expectNoWake(t *testing.T, wake <-chan struct{}, when string) {
	t.Helper()
	select {
	case <-wake:
		t.Errorf("woken %s", when)
	default:
	}
}
