package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// lockedByHand begins a transaction that is in nobody's turn, as another process does.
func lockedByHand(t *testing.T, p *fixture) *sql.Tx {
	t.Helper()
	tx, err := openTap(t, &tap{driver: p.tap.driver, dsn: p.dsn}).BeginTx(t.Context(), nil)
	expectNoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() }) // a no-op for a test that has ended it
	return tx
}

// The lock's holder does not move. Whoever waits for it returns when its context ends,
// and not when SQLite's own time-out, 10 s here, does; so do those behind it.
func TestSQLite_WaitsNoLongerThanTheContext(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	holder := lockedByHand(t, p)
	var waiting sync.WaitGroup
	for range 8 {
		waiting.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			begin := time.Now()
			expectError(t, p.box.RunInTx(ctx, p.publishing(newMessage("late", ""))), context.DeadlineExceeded)
			if waited := time.Since(begin); waited > 5*time.Second {
				t.Errorf("waited %v", waited)
			}
		})
	}
	waiting.Wait()
	expectNoError(t, holder.Rollback())
	p.publish(t, newMessage("a", ""))
	expectIDs(t, p.read(t), "a")
}

// Without a deadline the wait ends once, and is not begun anew for each of the retries.
func TestSQLite_WaitsOnceWithoutADeadline(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	lockedByHand(t, p)
	begin := time.Now()
	expectError(t, p.box.RunInTx(t.Context(), p.publishing(newMessage("a", ""))), oncemill.ErrDatabaseLocked)
	if waited := time.Since(begin); waited > time.Minute {
		t.Errorf("waited %v", waited)
	}
}

func (p *fixture) publishing(msg *message.Message) func(context.Context, *sql.Tx) error {
	return func(_ context.Context, tx *sql.Tx) error { return p.box.Publisher(tx).Publish("orders", msg) }
}

// A transaction inside another one would wait for itself.
func TestSQLite_RefusesATransactionInsideAnother(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	err := p.box.RunInTx(t.Context(), func(ctx context.Context, _ *sql.Tx) error {
		return p.box.RunInTx(ctx, p.publishing(newMessage("inner", "")))
	})
	expectError(t, err, oncemill.ErrNestedTx)
	p.publish(t, newMessage("a", ""))
	expectIDs(t, p.read(t), "a")
}

// The transaction of a handler that does not heed its context has ended with that, and
// the turn with it.
func TestSQLite_AHandlerWhoseContextEndedKeepsNobody(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	ctx, cancel := context.WithCancel(t.Context())
	running, end := make(chan struct{}), make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- p.box.RunInTx(ctx, func(context.Context, *sql.Tx) error {
			close(running)
			<-end
			return nil
		})
	}()
	<-running
	cancel()
	p.publish(t, newMessage("a", ""))
	close(end)
	expectError(t, <-ended, context.Canceled)
	expectIDs(t, p.read(t), "a")
}

// What SQLite has rolled back does not commit in pieces, whatever the function overlooks.
func TestSQLite_ALostTransactionPublishesNothing(t *testing.T) {
	t.Parallel()
	db := testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db"))
	expectNoError(t, oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations))
	box, err := outbox.New(db, outbox.Config{})
	expectNoError(t, err)
	for _, text := range []string{`create table names (name text primary key)`, `insert into names values ('taken')`} {
		_, err := db.ExecContext(t.Context(), text)
		expectNoError(t, err)
	}
	p := &fixture{db: db, box: box, queue: outboxqueue.Of(box)}
	var overlooked error
	err = box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		_, overlooked = tx.ExecContext(ctx, `insert or rollback into names values ('taken')`)
		_ = box.Publisher(tx).Publish("orders", newMessage("a", ""))
		return nil
	})
	if overlooked == nil || err == nil || errors.Is(err, outbox.ErrCommitUnknown) {
		t.Errorf("after %v: %v", overlooked, err)
	}
	if rows := p.read(t); len(rows) != 0 {
		t.Errorf("%d messages of a transaction that was rolled back", len(rows))
	}
	expectNoError(t, box.RunInTx(t.Context(), p.publishing(newMessage("b", ""))))
	expectIDs(t, p.read(t), "b")
}

// What begins is not interrupted, so no connection is left in a transaction. In memory
// the connection is the database, and cannot be given up.
func TestSQLite_ACanceledBeginLeavesNothingOpen(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(&tap{driver: &sqlite.Driver{}, dsn: oncemill.SQLiteDSN(":memory:")})
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(1)
	cfg := outbox.Config{Database: oncemill.Config{Dialect: oncemill.SQLite}}
	expectNoError(t, oncemill.Migrate(t.Context(), db, cfg.Database, outbox.Migrations))
	box, err := outbox.New(db, cfg)
	expectNoError(t, err)
	p := &fixture{db: db, cfg: cfg, box: box, queue: outboxqueue.Of(box)}
	var publishing sync.WaitGroup
	var committed atomic.Int64
	for w := range 4 {
		publishing.Go(func() {
			for i := range 250 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*4*time.Microsecond)
				err := box.RunInTx(ctx, p.publishing(newMessage(fmt.Sprint(w, "/", i), "")))
				cancel()
				switch {
				case err == nil:
					committed.Add(1)
				case !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, sql.ErrTxDone):
					t.Errorf("%d/%d: %v", w, i, err)
				}
			}
		})
	}
	publishing.Wait()
	p.publish(t, newMessage("last", ""))
	if n := p.count(t, `select count(*) from {{outbox}}`); n != int(committed.Load())+1 {
		t.Errorf("%d rows, %d committed", n, committed.Load()+1)
	}
}

// Two handles are as two processes: neither has the other's turn, and both get on.
func TestSQLite_TwoHandlesShareAFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	var done [2]atomic.Int64
	working, stop := context.WithCancel(t.Context())
	defer stop()
	var running sync.WaitGroup
	for n := range done {
		db := testserver.OpenSQLite(t, path)
		expectNoError(t, oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations))
		box, err := outbox.New(db, outbox.Config{})
		expectNoError(t, err)
		for w := range 4 {
			running.Go(func() {
				for i := 0; working.Err() == nil; i++ {
					err := box.RunInTx(context.WithoutCancel(working), func(_ context.Context, tx *sql.Tx) error {
						testserver.Pause(t.Context(), 20*time.Millisecond)
						return box.Publisher(tx).Publish("orders", newMessage(fmt.Sprint(n, "/", w, "/", i), ""))
					})
					expectNoError(t, err)
					done[n].Add(1)
				}
			})
		}
	}
	eventually(t, "both have committed", func() bool { return min(done[0].Load(), done[1].Load()) >= 20 })
	a, b := done[0].Load(), done[1].Load()
	stop()
	running.Wait()
	if most, least := max(a, b), min(a, b); most > 4*least {
		t.Errorf("one has committed %d times, the other %d", most, least)
	}
}

// What is committed into a file that nobody can open any more would be lost.
func TestSQLite_KnowsThatItsFileIsGone(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(path string) error{
		"removed": os.Remove,
		"replaced": func(path string) error {
			return errors.Join(os.Rename(path, path+".old"), os.WriteFile(path, nil, 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "test.db")
			db := testserver.OpenSQLite(t, path)
			expectNoError(t, oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations))
			box, err := outbox.New(db, outbox.Config{})
			expectNoError(t, err)
			p := &fixture{db: db, box: box}
			expectNoError(t, box.RunInTx(t.Context(), p.publishing(newMessage("a", ""))))
			expectNoError(t, replace(path))
			expectError(t, box.RunInTx(t.Context(), p.publishing(newMessage("b", ""))), oncemill.ErrDatabaseReplaced)
		})
	}
}

// The first transaction looks at the settings, also where nothing was migrated.
func TestSQLite_TheFirstTransactionChecksTheSettings(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "test.db")
	expectNoError(t, oncemill.Migrate(t.Context(), testserver.OpenSQLite(t, path), oncemill.Config{}, outbox.Migrations))
	plain, err := sql.Open("sqlite", path)
	expectNoError(t, err)
	t.Cleanup(func() { plain.Close() })
	box, err := outbox.New(plain, outbox.Config{})
	expectNoError(t, err)
	p := &fixture{db: plain, box: box}
	var wrong *oncemill.ConfigError
	if err := box.RunInTx(t.Context(), p.publishing(newMessage("a", ""))); !errors.As(err, &wrong) {
		t.Errorf("got %v", err)
	}
}

// A full disk gives way some time, and what was delivered is kept until then.
func TestSQLite_AFullDiskDropsNoHistory(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	for i := range 200 {
		p.publish(t, newMessage(fmt.Sprint(i), ""))
	}
	rows := p.read(t)
	full := openTap(t, &tap{driver: p.tap.driver, dsn: p.dsn + "&_pragma=max_page_count(1)"}) // it is larger now
	box, err := outbox.New(full, p.cfg)
	expectNoError(t, err)
	if removal, err := outboxqueue.Of(box).Remove(t.Context(), refs(rows)); err == nil || removal.Missed != 0 {
		t.Errorf("%+v, %v: the history grew without room, or was given up", removal, err)
	}
	if n := p.count(t, `select count(*) from {{outbox}}`) + p.count(t, `select count(*) from {{outbox_history}}`); n != len(rows) {
		t.Errorf("%d of %d rows are left", n, len(rows))
	}
	removal, err := p.queue.Remove(t.Context(), refs(rows))
	expectNoError(t, err)
	if n := p.count(t, `select count(*) from {{outbox_history}}`); n != len(rows) || removal.Missed != 0 {
		t.Errorf("%d rows in the history, %d missed", n, removal.Missed)
	}
}
