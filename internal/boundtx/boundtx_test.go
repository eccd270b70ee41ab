package boundtx_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// fixture is a database behind a proxy, and a direct handle on it.
type fixture struct {
	proxy      *testserver.PostgresProxy
	db, direct *sql.DB
	calls      *bounded.Calls
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	pg := testserver.Postgres(t)
	f := &fixture{direct: pg.DB, calls: bounded.New(10)}
	t.Cleanup(func() { <-f.calls.Idle() })
	var dsn string
	f.proxy, dsn = testserver.NewPostgresProxy(t, pg.URL(t, "binary_parameters=yes"))
	db, err := sql.Open(testserver.DriverName(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	f.db = db
	if _, err := f.direct.ExecContext(t.Context(), `create table t (n int)`); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) begin(ctx context.Context, t *testing.T) *boundtx.Tx {
	t.Helper()
	tx, err := boundtx.Begin(ctx, f.db, oncemill.PostgreSQL, f.calls, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tx.Rollback)
	if _, err := tx.Raw.ExecContext(ctx, `insert into t values (1)`); err != nil {
		t.Fatal(err)
	}
	return tx
}

func (f *fixture) expectRows(t *testing.T, want int) {
	t.Helper()
	var n int
	// The lock waits for transactions that have written.
	if _, err := f.direct.ExecContext(t.Context(), `alter table t add if not exists m int`); err != nil {
		t.Fatal(err)
	}
	if err := f.direct.QueryRowContext(t.Context(), `select count(*) from t`).Scan(&n); err != nil || n != want {
		t.Errorf("%d rows, %v; want %d", n, err, want)
	}
}

func statement(text string) func(string) bool {
	return func(s string) bool { return strings.HasPrefix(strings.ToLower(s), text) }
}

func TestTx_EndsWithTheContextOfBegin(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	tx := f.begin(ctx, t)
	cancel()
	if err := tx.Commit(time.Minute); !errors.Is(err, context.Canceled) || errors.Is(err, boundtx.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	f.expectRows(t, 0)
}

func TestCommit_WithoutAnswerIsUnknownAndContinues(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx := f.begin(t.Context(), t)
	f.proxy.Silence(statement("commit"), 1)
	if err := tx.Commit(10 * time.Millisecond); !errors.Is(err, boundtx.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	f.proxy.Resume()
	<-f.calls.Idle()
	f.expectRows(t, 1)
}

func TestDo_WithoutAnswerAbandonsTheTransaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tx := f.begin(ctx, t)
	f.proxy.Silence(statement("select"), 1)
	time.AfterFunc(300*time.Millisecond, cancel)
	_, err := boundtx.Wait(ctx, tx, func() (sql.Result, error) { return tx.Raw.ExecContext(ctx, `select 1`) })
	if err == nil {
		t.Error("a silent server has answered")
	}
	if _, err := boundtx.Wait(t.Context(), tx, func() (sql.Result, error) { return tx.Raw.ExecContext(ctx, `select 1`) }); !errors.Is(err, sql.ErrTxDone) {
		t.Errorf("the next statement: %v", err)
	}
	tx.Rollback()
	f.proxy.Cut()
	<-f.calls.Idle()
	f.expectRows(t, 0)
}

func TestRollback_ReturnsWithoutAnswer(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	tx := f.begin(t.Context(), t)
	f.proxy.Silence(statement("rollback"), 1)
	tx.Rollback()
	f.proxy.Cut()
	<-f.calls.Idle()
	f.expectRows(t, 0)
}

func TestBegin_ReturnsWithoutAnswer(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if err := f.db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.proxy.Silence(nil, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := boundtx.Begin(ctx, f.db, oncemill.PostgreSQL, f.calls, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	f.proxy.Cut()
}

// All idle connections of a pool lead to a server that is frozen. New ones reach the one that has
// replaced it. Together they cost one caller a second, since only the first is asked.
func TestBegin_TriesAnotherConnectionThanTheSilent(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const idle = 8
	f.db.SetMaxIdleConns(idle)
	var before []*boundtx.Tx
	for range idle {
		before = append(before, f.begin(t.Context(), t))
	}
	for _, tx := range before {
		tx.Rollback()
	}
	f.proxy.Silence(nil, 0) // the connections that there are
	tx := f.begin(t.Context(), t)
	if err := tx.Commit(time.Minute); err != nil {
		t.Error(err)
	}
	f.expectRows(t, 1)
	if n := f.calls.Abandoned(); n != 0 {
		t.Errorf("%d calls were abandoned", n)
	}
	if s := f.db.Stats(); s.InUse != 0 || s.OpenConnections != 1 {
		t.Errorf("%d connections are open, %d in use", s.OpenConnections, s.InUse)
	}
}

// A server that answers no BEGIN costs ten seconds.
func TestBegin_AbandonsASilentConnection(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if err := f.db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.proxy.Silence(statement("begin"), 2)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	if _, err := boundtx.Begin(ctx, f.db, oncemill.PostgreSQL, f.calls, nil); !errors.Is(err, bounded.ErrAbandoned) || ctx.Err() != nil {
		t.Errorf("got %v, and the context has ended: %v", err, ctx.Err())
	}
	tx := f.begin(t.Context(), t)
	if err := tx.Commit(time.Minute); err != nil {
		t.Error(err)
	}
	f.proxy.Cut()
	f.expectRows(t, 1)
}

// lib/pq begins with READ WRITE, and pgx fails at the first statement that writes.
func TestBegin_RecognisesAStandby(t *testing.T) {
	t.Parallel()
	primary := testserver.PrivatePostgres(t)
	if _, err := primary.Open().ExecContext(t.Context(), `create table t (n int)`); err != nil {
		t.Fatal(err)
	}
	standby := primary.Standby().Open()
	tx, err := boundtx.Begin(t.Context(), standby, oncemill.PostgreSQL, bounded.New(1), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err == nil {
		defer tx.Rollback()
		_, err = tx.Raw.ExecContext(t.Context(), `create temporary table t (n int)`)
	}
	if !sqlerr.ReadOnly(err) || !sqlerr.Connection(err) {
		t.Errorf("got %v", err)
	}
}

// After an abandoned statement the transaction rolls back, and no COMMIT is sent.
func TestCommit_AfterAnAbandonedStatementIsNotUnknown(t *testing.T) {
	f := newFixture(t)
	tx := f.begin(t.Context(), t)
	release := make(chan struct{})
	defer close(release)
	if _, err := boundtx.Do(t.Context(), tx, time.Millisecond, func(context.Context) (int, error) { <-release; return 0, nil }); !errors.Is(err, bounded.ErrAbandoned) {
		t.Fatal(err)
	}
	if err := tx.Commit(time.Second); errors.Is(err, boundtx.ErrUnknown) || !errors.Is(err, bounded.ErrAbandoned) {
		t.Errorf("got %v", err)
	}
}

// Connections to a silent server leave the pool while it is silent, whatever was sent over
// them.
func TestTx_SilentServerDoesNotExhaustThePool(t *testing.T) {
	t.Parallel()
	for name, meet := range map[string]func(ctx context.Context, tx *boundtx.Tx) error{
		"statement": func(ctx context.Context, tx *boundtx.Tx) error {
			_, err := boundtx.Wait(ctx, tx, func() (sql.Result, error) { return tx.Raw.ExecContext(ctx, `select 1`) })
			tx.Rollback()
			return err
		},
		"commit":   func(_ context.Context, tx *boundtx.Tx) error { return tx.Commit(100 * time.Millisecond) },
		"rollback": func(_ context.Context, tx *boundtx.Tx) error { tx.Rollback(); return context.DeadlineExceeded },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			const size = 8
			f.db.SetMaxOpenConns(size)
			txs := make([]*boundtx.Tx, size)
			for i := range txs {
				txs[i] = f.begin(t.Context(), t)
			}
			f.proxy.Silence(nil, 0)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			var all sync.WaitGroup
			for _, tx := range txs {
				all.Go(func() {
					if err := meet(ctx, tx); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("a silent server has answered: %v", err)
					}
				})
			}
			all.Wait()
			for range size {
				tx := f.begin(t.Context(), t)
				if err := tx.Commit(time.Minute); err != nil {
					t.Error(err)
				}
			}
			<-f.calls.Idle()
			testserver.Eventually(t, "no connection is in use", func() bool { return f.db.Stats().InUse == 0 })
			f.proxy.Cut()
			if name != "commit" { // whose outcome is unknown
				f.expectRows(t, size)
			}
		})
	}
}

// Without its synchronous standby the server answers no COMMIT. Each closed connection then
// means one more on the same server, so only a few are closed.
func TestTx_CommitsThatWaitForAStandbyKeepTheirConnections(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const size, few = 8, 4
	f.db.SetMaxOpenConns(size)
	commit := func(n int) {
		txs := make([]*boundtx.Tx, n)
		for i := range txs {
			txs[i] = f.begin(t.Context(), t)
		}
		f.proxy.Silence(statement("commit"), n)
		var all sync.WaitGroup
		for _, tx := range txs {
			all.Go(func() {
				if err := tx.Commit(time.Millisecond); !errors.Is(err, boundtx.ErrUnknown) {
					t.Errorf("got %v", err)
				}
			})
		}
		all.Wait()
	}
	commit(size)
	commit(few)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if tx, err := boundtx.Begin(ctx, f.db, oncemill.PostgreSQL, f.calls, nil); !errors.Is(err, context.DeadlineExceeded) {
		if err == nil {
			tx.Rollback()
		}
		t.Errorf("a connection was free: %v", err)
	}
	f.proxy.Resume()
	<-f.calls.Idle()
	tx := f.begin(t.Context(), t)
	if err := tx.Commit(time.Minute); err != nil {
		t.Error(err)
	}
	f.expectRows(t, size+few+1)
}

// The call returns after its connection was closed. The pool no longer has it.
func TestDo_ClosedConnectionLeavesThePool(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	release := make(chan struct{})
	ctx, giveUp := context.WithCancel(t.Context())
	if _, err := bounded.Do(ctx, f.calls, time.Hour, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, shorttx.Run(ctx, f.db, shorttx.For(time.Minute), func(tx *sql.Tx) error {
			_, err := tx.ExecContext(context.WithoutCancel(ctx), `select 1`)
			giveUp()
			<-release
			return err
		})
	}); !errors.Is(err, bounded.ErrAbandoned) {
		t.Errorf("got %v", err)
	}
	testserver.Eventually(t, "its connection is gone", func() bool {
		n := 0
		if err := f.direct.QueryRowContext(t.Context(), `select count(*) from pg_stat_activity where datname = current_database() and query = 'select 1'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	})
	close(release)
	<-f.calls.Idle()
	if n := f.db.Stats().OpenConnections; n != 0 {
		t.Errorf("%d connections are in the pool", n)
	}
}

// Any number of connections that the server closed while idle is replaced.
func TestBegin_ReplacesConnectionsThatWereClosed(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	const most = 5
	f.db.SetMaxIdleConns(most)
	var held []*sql.Conn
	for range most {
		conn, err := f.db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	for _, conn := range held {
		_ = conn.Close()
	}
	f.proxy.Cut()
	tx := f.begin(t.Context(), t)
	if err := tx.Commit(boundtx.CommitLimit); err != nil {
		t.Error(err)
	}
	f.expectRows(t, 1)
}

func TestNative_RunsInTheTransactionOrNotAtAll(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	native := func(tx *boundtx.Tx) (ran bool, err error) {
		return boundtx.Native(t.Context(), tx, func(_ context.Context, conn any) (bool, error) { return conn != nil, nil })
	}
	tx := f.begin(t.Context(), t)
	if ran, err := native(tx); !ran || err != nil {
		t.Errorf("in the transaction: %t, %v", ran, err)
	}
	// A call that waits during a COMMIT without answer is refused afterwards.
	f.proxy.Silence(statement("commit"), 1)
	committed := make(chan error, 1)
	go func() { committed <- tx.Commit(boundtx.CommitLimit) }()
	testserver.Eventually(t, "the COMMIT is sent", func() bool { return f.proxy.Silenced() == 1 })
	type result struct {
		ran bool
		err error
	}
	waiting := make(chan result, 1)
	go func() {
		ran, err := native(tx)
		waiting <- result{ran, err}
	}()
	f.proxy.Resume()
	if err := <-committed; err != nil {
		t.Error(err)
	}
	if r := <-waiting; r.ran || r.err == nil {
		t.Errorf("after the COMMIT: %t, %v", r.ran, r.err)
	}
	if ran, err := native(tx); ran || err == nil {
		t.Errorf("after the end: %t, %v", ran, err)
	}
	tx = f.begin(t.Context(), t)
	if _, err := boundtx.Native(t.Context(), tx, func(context.Context, any) (int, error) { panic("bad") }); !errors.As(err, new(*oncemill.PanicError)) {
		t.Errorf("a panic: %v", err)
	}
	if ran, err := native(tx); !ran || err != nil {
		t.Errorf("after a panic: %t, %v", ran, err)
	}
	tx.Rollback()
	if ran, err := native(tx); ran || err == nil {
		t.Errorf("after the rollback: %t, %v", ran, err)
	}
	f.expectRows(t, 1)
}
