package mill_test

import (
	"context"
	"database/sql"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
)

// odd is a subscriber made of its methods.
type odd struct {
	subscribe func(ctx context.Context) (<-chan *message.Message, error)
	close     func() error
}

func (o odd) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	return o.subscribe(ctx)
}
func (o odd) Close() error { return o.close() }

func from(s message.Subscriber) func(*inbox.Inbox) (message.Subscriber, error) {
	return func(*inbox.Inbox) (message.Subscriber, error) { return s, nil }
}

// hanging returns a consumer whose handler does not return before release is closed.
func hanging(broker message.Subscriber) (c mill.Consumer, begun, release chan struct{}) {
	c, begun, release = stock(), make(chan struct{}), make(chan struct{})
	c.Subscriber = from(broker)
	c.Handler = func(msg *message.Message) ([]*message.Message, error) {
		close(begun)
		<-release
		tx, _ := inbox.TxFromContext(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `insert into effects values (1)`)
		return nil, err
	}
	return c, begun, release
}

// Watermill's own subscribers end the contexts of their messages when the subscription ends,
// and when they are closed.
func TestRun_RunningHandlersFinish(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	if _, err := db.ExecContext(t.Context(), `create table effects (n integer)`); err != nil {
		t.Fatal(err)
	}
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	c, begun, release := hanging(broker)
	m := newMill(t, db, mill.Config{Consumers: []mill.Consumer{c}})
	stop := run(t, m)
	eventually(t, "it is ready", func() bool { return m.Ready() == nil })
	if err := broker.Publish("orders", message.NewMessage("order 1", nil)); err != nil {
		t.Fatal(err)
	}
	<-begun
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	eventually(t, "it is ready no more", func() bool { return errors.Is(m.Ready(), mill.ErrNotRunning) })
	close(release)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for table, query := range map[string]string{"effects": `select count(*) from effects`, "ids": `select count(*) from oncemill_inbox`} {
		var n int
		if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil || n != 1 {
			t.Errorf("%d %s: %v", n, table, err)
		}
	}
}

func TestRun_NamesAHandlerThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	broker := &channel{messages: make(chan *message.Message)}
	c, begun, release := hanging(broker)
	m := newMill(t, testserver.SQLite(t), mill.Config{StopTimeout: 50 * time.Millisecond, Consumers: []mill.Consumer{c}})
	stop := run(t, m)
	msg := message.NewMessage("order 1", nil)
	broker.messages <- msg
	<-begun
	if err := stop(); !errors.Is(err, mill.ErrStillRunning) || !strings.Contains(err.Error(), "consumer stock") {
		t.Errorf("got %v", err)
	}
	close(release)
	<-msg.Nacked()
}

// Nobody waits for a subscriber that hangs, and it is closed, which frees it.
func TestRun_StopsWhileASubscriberHangs(t *testing.T) {
	t.Parallel()
	begun, closed := make(chan struct{}), make(chan struct{})
	c := stock()
	c.Subscriber = from(odd{
		subscribe: func(context.Context) (<-chan *message.Message, error) { close(begun); <-closed; return nil, errAway },
		close:     sync.OnceValue(func() error { close(closed); return nil }),
	})
	stop := run(t, newMill(t, testserver.SQLite(t), mill.Config{StopTimeout: time.Second, Consumers: []mill.Consumer{c}}))
	<-begun
	if err := stop(); err != nil {
		t.Error(err)
	}
	<-closed
}

func TestRun_ReturnsIfSubscribersDoNotClose(t *testing.T) {
	t.Parallel()
	release, done := make(chan struct{}), make(chan struct{})
	c := stock()
	c.Subscriber = from(odd{close: func() error { defer close(done); <-release; return nil }})
	m := newMill(t, testserver.SQLite(t), mill.Config{NoMigrate: true, StopTimeout: 50 * time.Millisecond, Consumers: []mill.Consumer{c}})
	if err := m.Run(t.Context()); !errors.Is(err, mill.ErrStillRunning) || !strings.Contains(err.Error(), "subscriber of stock") {
		t.Errorf("got %v", err)
	}
	close(release)
	<-done
}

// The database is silent before the first statement, or in the middle.
func TestRun_ReturnsWhileTheDatabaseIsSilentAtTheStart(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{"begin", "create"} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			proxy, db := testserver.OpenSilenceable(t, pg.URL(t))
			proxy.Silence(testserver.Containing(statement), 1)
			m := newMill(t, db, mill.Config{Database: pg.Config, Outbox: &outbox.Config{}})
			stop := run(t, m)
			eventually(t, "it is silent", func() bool { return proxy.Silenced() > 0 })
			if err := stop(); err != nil && !errors.Is(err, mill.ErrStillRunning) {
				t.Error(err)
			}
			proxy.Cut()
			eventually(t, "nothing uses the database", func() bool { return db.Stats().InUse == 0 })
		})
	}
}

// Drivers report a statement that was stopped as an error of the database.
func TestRun_StopsWithStatementsRunning(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	for name, c := range map[string]struct {
		db    *sql.DB
		cfg   oncemill.Config
		query string
	}{
		"PostgreSQL": {pg.DB, pg.Config, `select pg_sleep(600)`},
		"SQLite":     {testserver.SQLite(t), oncemill.Config{}, `with recursive s (n) as (select 1 union all select n + 1 from s) select count(*) from s`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMill(t, c.db, mill.Config{Database: c.cfg, Outbox: &outbox.Config{}})
			begun := make(chan struct{})
			stop := run(t, m, func(ctx context.Context) error {
				close(begun)
				_, err := c.db.ExecContext(ctx, c.query)
				return err
			})
			<-begun
			testserver.Pause(t.Context(), 100*time.Millisecond)
			if err := stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRun_StopsWhileItsMigrationsWait(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	tx, err := pg.DB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // it only held a lock
	var pid int
	lock := `select pg_backend_pid() from pg_advisory_xact_lock(hashtextextended('oncemill migrate "` + pg.Config.Schema + `"', 0))`
	if err := tx.QueryRowContext(t.Context(), lock).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	stop := run(t, newMill(t, pg.DB, mill.Config{Database: pg.Config, Outbox: &outbox.Config{}}))
	eventually(t, "its migrations wait", func() bool {
		var n int
		return pg.DB.QueryRowContext(t.Context(), `select count(*) from pg_stat_activity where $1 = any (pg_blocking_pids(pid))`, pid).Scan(&n) == nil && n == 1
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestRun_ReturnsNilForAnEndedContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	broker := &channel{}
	c := stock()
	c.Subscriber = from(broker)
	for name, db := range map[string]*sql.DB{"PostgreSQL": testserver.Postgres(t).DB, "SQLite": testserver.SQLite(t)} {
		if err := newMill(t, db, mill.Config{Consumers: []mill.Consumer{c}}).Run(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if broker.closed.Load() != 2 {
		t.Errorf("closed %d times", broker.closed.Load())
	}
	stop := run(t, newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}}), func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	})
	if err := stop(); err != nil {
		t.Errorf("a part has said why it ended: %v", err)
	}
}

func TestRun_NoticesAPartThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	err := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}}).Run(t.Context(), func(context.Context) error {
		runtime.Goexit()
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "argument 1 of Run") {
		t.Errorf("got %v", err)
	}
}

// A subscription that ends by itself would leave a service that does nothing.
func TestRun_NoticesASubscriptionThatEnds(t *testing.T) {
	t.Parallel()
	c, messages := stock(), make(chan *message.Message)
	close(messages)
	c.Subscriber = from(odd{
		subscribe: func(context.Context) (<-chan *message.Message, error) { return messages, nil },
		close:     func() error { return nil },
	})
	if err := newMill(t, testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{c}}).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "consumer stock") {
		t.Errorf("got %v", err)
	}
}

func TestNew_RefusesNil(t *testing.T) {
	t.Parallel()
	nothing, middleware := stock(), stock()
	nothing.Subscriber = from(nil)
	middleware.Middleware = []message.HandlerMiddleware{nil}
	for field, c := range map[string]mill.Consumer{"mill.Consumer.Subscriber": nothing, "mill.Config.Consumers[0].Middleware": middleware} {
		if _, err := mill.New(testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{c}, Logger: quiet}); !slices.Equal(fieldsOf(err), []string{field}) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
