package outbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestRunInTx_ALostAnswerOfTheCommitIsUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrives bool
		want    []string
	}{
		"the commit has arrived":     {true, []string{"a"}},
		"the commit has not arrived": {false, nil},
	} {
		for _, params := range [][]string{nil, {"binary_parameters=yes"}} {
			t.Run(fmt.Sprint(name, params), func(t *testing.T) {
				t.Parallel()
				p := onPostgres(t, params...)
				cut := testserver.NewCommitCutter(t, p.dsn, c.arrives)
				db := openTap(t, &tap{driver: p.tap.driver, dsn: cut.DSN})
				box, err := outbox.New(db, p.cfg)
				if err != nil {
					t.Fatal(err)
				}
				publish := func(id string) (runs int, err error) {
					err = box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
						runs++
						return box.Publisher(tx).Publish("orders", newMessage(id, "k"))
					})
					return runs, err
				}
				cut.Arm()
				runs, err := publish("a")
				expectError(t, err, outbox.ErrCommitUnknown)
				if runs != 1 {
					t.Errorf("%d runs: an unknown outcome was tried again", runs)
				}
				expectIDs(t, p.read(t), c.want...)
				// The pool works on.
				_, err = publish("b")
				expectNoError(t, err)
				expectIDs(t, p.read(t), append(c.want, "b")...)
			})
		}
	}
}

// The server says that the transaction is gone; nothing is unknown then.
func TestRunInTx_ARefusedCommitIsADefiniteFailure(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.db.SetMaxOpenConns(1) // a connection left in the transaction would show
		p.exec(t, `create table customers (id integer primary key)`)
		p.exec(t, `create table sales (customer integer references customers (id) deferrable initially deferred)`)
		wake, stop := p.queue.Listen()
		defer stop()
		runs := 0
		err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			runs++
			if _, err := tx.ExecContext(ctx, `insert into sales (customer) values (42)`); err != nil {
				return err
			}
			return p.box.Publisher(tx).Publish("orders", newMessage("a", ""))
		})
		if err == nil || errors.Is(err, outbox.ErrCommitUnknown) || runs != 1 {
			t.Errorf("%d runs, %v", runs, err)
		}
		expectNoWake(t, wake, "after a refused commit")
		expectIDs(t, p.read(t))
		p.publish(t, newMessage("b", ""))
		expectIDs(t, p.read(t), "b")
	})
}

// A function that overlooks the error of its statement has spoilt its
// transaction: PostgreSQL answers the commit with a rollback.
func TestRunInTx_AnOverlookedErrorIsADefiniteFailure(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		err := p.box.Publisher(tx).Publish("orders", newMessage("a", ""))
		_, _ = tx.ExecContext(ctx, `select 1/0`)
		return err
	})
	if err == nil || errors.Is(err, outbox.ErrCommitUnknown) {
		t.Errorf("got %v", err)
	}
	expectIDs(t, p.read(t))
}

// A backend that is told to end while it commits says so, and yet the commit may
// stand: it may have been on its way out.
func TestRunInTx_AShutdownDuringTheCommitIsUnknown(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `create table slow (id int)`)
	p.exec(t, `create function slow() returns trigger language plpgsql as $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$`)
	p.exec(t, `create constraint trigger slow after insert on slow deferrable initially deferred for each row execute function slow()`)
	err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into slow values (1)`)
		return err
	})
	expectError(t, err, outbox.ErrCommitUnknown)
}

func TestRunInTx_ACommitThatTheServerCancelsIsADefiniteFailure(t *testing.T) {
	t.Parallel()
	p := onPostgres(t, "binary_parameters=yes")
	p.exec(t, `create table slow (id int)`)
	p.exec(t, `create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(60); return null; end $$`)
	p.exec(t, `create constraint trigger slow after insert on slow deferrable initially deferred for each row execute function slow()`)
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.CommitTimeout = time.Minute })
	var waiting sync.WaitGroup
	err := p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		pid := backend(t, tx)
		waiting.Go(func() {
			eventually(t, "the commit is on its way", func() bool {
				return p.count(t, `select count(*) from pg_stat_activity where pid = $1 and query ilike 'commit' and wait_event = 'PgSleep'`, pid) == 1
			})
			p.exec(t, `select pg_cancel_backend($1)`, pid)
		})
		_, err := tx.ExecContext(ctx, `insert into slow values (1)`)
		return errors.Join(err, p.box.Publisher(tx).Publish("orders", newMessage("a", "")))
	})
	waiting.Wait()
	if state := (interface{ SQLState() string })(nil); !errors.As(err, &state) || state.SQLState() != "57014" || errors.Is(err, outbox.ErrCommitUnknown) {
		t.Errorf("got %v", err)
	}
	expectIDs(t, p.read(t))
}

// stalled returns an outbox on a server whose commits wait for a standby that is
// down, and that standby.
func stalled(t *testing.T, commitTimeout time.Duration) (*fixture, *testserver.PostgresServer) {
	t.Helper()
	primary := testserver.PrivatePostgres(t)
	p := newFixture(t, testserver.Driver(), primary.DSN(), outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
	p.use(t, p.db, func(cfg *outbox.Config) { cfg.CommitTimeout = commitTimeout })
	standby := primary.Standby()
	standby.Stop()
	p.exec(t, `alter system set synchronous_standby_names = '*'`)
	p.exec(t, `select pg_reload_conf()`)
	// Sessions show the setting before commits wait: the checkpointer has to learn of it.
	for waits := false; !waits; {
		committed := make(chan struct{})
		go func() {
			defer close(committed)
			p.exec(t, `comment on table oncemill.outbox is 'a commit'`)
		}()
		eventually(t, "a commit waits for the standby, or does not", func() bool {
			select {
			case <-committed:
				return true
			default:
				waits = p.count(t, `select count(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'`) > 0
				return waits
			}
		})
		<-committed
	}
	return p, standby
}

// publishUnder publishes a message under a context that ends while the commit waits for the
// standby. Then it calls then.
func (p *fixture) publishUnder(t *testing.T, then func()) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var ending sync.WaitGroup
	defer ending.Wait()
	ending.Go(func() {
		eventually(t, "the commit waits", func() bool { return p.count(t, stalledCommits) == 1 })
		cancel()
		then()
	})
	return p.box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish("orders", newMessage("a", ""))
	})
}

const stalledCommits = `select count(*) from pg_stat_activity where wait_event = 'SyncRep'`

// A wait that is cut short would show rows that a failover can lose.
func TestRunInTx_ACommitThatWaitsForAStandbyIsUnknownAndGoesOn(t *testing.T) {
	t.Parallel()
	p, standby := stalled(t, 500*time.Millisecond)
	expectError(t, p.publishUnder(t, func() {}), outbox.ErrCommitUnknown)
	if waiting, shown := p.count(t, stalledCommits), p.count(t, `select count(*) from oncemill.outbox`); waiting != 1 || shown != 0 {
		t.Errorf("%d commits wait, %d rows are shown", waiting, shown)
	}
	standby.Start()
	eventually(t, "the commit arrives", func() bool { return p.count(t, `select count(*) from oncemill.outbox`) == 1 })
}

func TestRunInTx_WaitsForTheAnswerToACommitAfterItsContextHasEnded(t *testing.T) {
	t.Parallel()
	p, standby := stalled(t, 5*time.Minute)
	expectNoError(t, p.publishUnder(t, standby.Start))
	if shown := p.count(t, `select count(*) from oncemill.outbox`); shown != 1 {
		t.Errorf("%d rows are shown", shown)
	}
}

// stubbornDriver is a driver whose Commit answers what it is told to, after the
// commit has been sent.
type stubbornDriver struct {
	answer func() error
	sent   int
}

func (d *stubbornDriver) Driver() driver.Driver                        { return d }
func (d *stubbornDriver) Open(string) (driver.Conn, error)             { return d, nil }
func (d *stubbornDriver) Connect(context.Context) (driver.Conn, error) { return d, nil }
func (d *stubbornDriver) Prepare(string) (driver.Stmt, error)          { return nil, driver.ErrSkip }
func (d *stubbornDriver) Begin() (driver.Tx, error)                    { return d, nil }
func (d *stubbornDriver) Close() error                                 { return nil }
func (d *stubbornDriver) Rollback() error                              { return nil }

func (d *stubbornDriver) Commit() error {
	d.sent++
	return d.answer()
}

func (d *stubbornDriver) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return d, nil
}

// pgxNotSent is what pgx returns of a commit that, it says, was not sent. It says
// so of some that were, so the word counts for nothing.
type pgxNotSent struct{ error }

func (pgxNotSent) SafeToRetry() bool { return true }
func (e pgxNotSent) Unwrap() error   { return e.error }

// pgx commits under the context of BeginTx: one that ends while the commit is on
// its way makes Commit return the context's error, bare, wherever the commit got.
func TestRunInTx_AContextThatEndsDuringTheCommitIsUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer  error
		unknown bool
	}{
		"canceled":         {context.Canceled, true},
		"deadline":         {fmt.Errorf("timeout: %w", context.DeadlineExceeded), true},
		"said not sent":    {pgxNotSent{fmt.Errorf("timeout: context already done: %w", context.Canceled)}, true},
		"rolled back":      {errors.New("commit unexpectedly resulted in rollback"), false},
		"ambiguous":        {&pq.Error{Code: "40003"}, true},
		"connection lost":  {driver.ErrBadConn, true},
		"anything foreign": {errors.New("whatever"), true},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		d := &stubbornDriver{answer: func() error { cancel(); return c.answer }}
		db := sql.OpenDB(d)
		box, err := outbox.New(db, outbox.Config{Database: oncemill.Config{Dialect: oncemill.PostgreSQL}})
		if err != nil {
			t.Fatal(err)
		}
		err = box.RunInTx(ctx, func(context.Context, *sql.Tx) error { return nil })
		if unknown := errors.Is(err, outbox.ErrCommitUnknown); err == nil || unknown != c.unknown || d.sent != 1 {
			t.Errorf("%s: sent %d times, %v", name, d.sent, err)
		}
		if !c.unknown && !strings.Contains(err.Error(), "commit") {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
		expectNoError(t, db.Close())
	}
}
