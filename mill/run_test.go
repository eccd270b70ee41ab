package mill_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

var eventually = testserver.Eventually

// channel is a subscriber with the messages of one topic, and a publisher to nowhere.
type channel struct {
	messages chan *message.Message
	refusals atomic.Int32 // Subscribe fails so often
	closed   atomic.Int32
}

var errAway = errors.New("the broker is away")

func (c *channel) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	if c.refusals.Add(-1) >= 0 {
		return nil, errAway
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case msg := <-c.messages:
				out <- msg
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (c *channel) Publish(string, ...*message.Message) error { return nil }

func (c *channel) Close() error {
	c.closed.Add(1)
	return nil
}

// run begins m and returns what ends it and waits for its error.
func run(t *testing.T, m *mill.Mill, parts ...func(context.Context) error) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx, parts...) }()
	return func() error {
		cancel()
		return <-ended
	}
}

func newMill(t *testing.T, db *sql.DB, cfg mill.Config) *mill.Mill {
	t.Helper()
	cfg.Logger = quiet
	m, err := mill.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestRun_CreatesTheTablesThatAreUsed(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]struct {
		cfg  mill.Config
		want []string
	}{
		"keys":     {mill.Config{Idempotency: &idempotency.Config{Scope: idempotency.SingleTenant()}}, []string{"idempotency"}},
		"outbox":   {mill.Config{Outbox: &outbox.Config{}}, []string{"outbox"}},
		"relay":    {mill.Config{Outbox: &outbox.Config{}, Sink: relay.FromPublisher(&channel{})}, []string{"audit", "dlq", "outbox", "relay", "steer"}},
		"consumer": {mill.Config{Consumers: []mill.Consumer{stock()}}, []string{"audit", "dlq", "inbox", "steer"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testserver.SQLite(t)
			checks := of.cfg
			checks.NoMigrate = true
			var schema *oncemill.SchemaError
			if err := newMill(t, db, checks).Run(t.Context()); !errors.As(err, &schema) {
				t.Errorf("without its tables: %v", err)
			}
			m := newMill(t, db, of.cfg)
			stop := run(t, m)
			eventually(t, "it is ready", func() bool { return m.Ready() == nil })
			if err := stop(); err != nil {
				t.Error(err)
			}
			if got := appliedSets(t, db); !slices.Equal(got, of.want) {
				t.Errorf("tables of %q, want %q", got, of.want)
			}
			again := newMill(t, db, checks)
			stop = run(t, again)
			eventually(t, "it is ready with the tables that are there", func() bool { return again.Ready() == nil })
			if err := stop(); err != nil {
				t.Error(err)
			}
			if err := again.Run(t.Context()); !errors.Is(err, mill.ErrRunning) {
				t.Errorf("run twice: %v", err)
			}
			if err := again.Ready(); !errors.Is(err, mill.ErrNotRunning) {
				t.Errorf("ready after its end: %v", err)
			}
		})
	}
}

func appliedSets(t *testing.T, db *sql.DB) []string {
	t.Helper()
	return testserver.Texts(t, db, `select distinct set_name from oncemill_migrations order by 1`)
}

// Without a relay, which would do it, nobody else removes old dead letters.
func TestRun_PurgesDeadLettersWithoutARelay(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	for id, hours := range map[string]int{"old": 3, "new": 0} {
		if _, err := db.ExecContext(t.Context(), `
insert into oncemill_dead_letters (state, source, consumer, topic, message_id, payload, reason, error, fingerprint, closed_at)
values ('replayed', 'consumer', 'stock', 'orders', ?1, x'00', 'failed', '', '', (unixepoch() - ?2 * 3600) * 1000000)`, id, hours); err != nil {
			t.Fatal(err)
		}
	}
	m := newMill(t, db, mill.Config{Consumers: []mill.Consumer{stock()}, Relay: relay.Config{LetterRetention: 2 * time.Hour}})
	stop := run(t, m)
	eventually(t, "the old one is gone", func() bool { return len(list(t, m)) == 1 })
	if left := list(t, m)[0].MessageID; left != "new" {
		t.Errorf("%s is left", left)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// sender passes on the ids of what is published.
type sender chan string

func (s sender) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		s <- msg.UUID
	}
	return nil
}

func (sender) Close() error { return nil }

// The relay stops last, and sends what the others publish at their end.
func TestRun_RelaysWhatIsPublishedWhileItStops(t *testing.T) {
	t.Parallel()
	sent := make(sender, 1)
	m := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}, Sink: relay.FromPublisher(sent)})
	stop := run(t, m, func(ctx context.Context) error {
		<-ctx.Done()
		err := m.Outbox().RunInTx(context.WithoutCancel(ctx), func(ctx context.Context, tx *sql.Tx) error {
			return m.Outbox().Publish(ctx, tx, "orders", message.NewMessage("the last order", nil))
		})
		if err != nil {
			return err
		}
		select {
		case <-sent:
			return nil
		case <-time.After(10 * time.Second):
			return errors.New("it was not sent")
		}
	})
	eventually(t, "it is ready", func() bool { return m.Ready() == nil })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A broker that is away when the service starts is waited for.
func TestRun_SubscribesWhenTheBrokerIsThere(t *testing.T) {
	t.Parallel()
	c, handled := stock(), make(chan string, 1)
	broker := &channel{messages: make(chan *message.Message)}
	broker.refusals.Store(1 << 30)
	c.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return broker, nil }
	c.Handler = func(msg *message.Message) ([]*message.Message, error) {
		handled <- msg.UUID
		return nil, nil
	}
	m := newMill(t, testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{c}})
	stop := run(t, m)
	eventually(t, "it was tried", func() bool { return broker.refusals.Load() < 1<<30 })
	eventually(t, "it is not ready for that", func() bool { return errors.Is(m.Ready(), mill.ErrNotSubscribed) })
	broker.refusals.Store(0)
	broker.messages <- message.NewMessage("order 1", nil)
	if got := <-handled; got != "order 1" {
		t.Errorf("handled %q", got)
	}
	if err := m.Ready(); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil || broker.closed.Load() == 0 {
		t.Errorf("closed %d times: %v", broker.closed.Load(), err)
	}
}

// A broker that is never there does not keep a service from stopping.
func TestRun_StopsWhileTheBrokerIsAway(t *testing.T) {
	t.Parallel()
	c, broker := stock(), &channel{}
	broker.refusals.Store(1 << 30)
	c.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return broker, nil }
	stop := run(t, newMill(t, testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{c}}))
	eventually(t, "it was tried", func() bool { return broker.refusals.Load() < 1<<30 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// Handlers that produce something they said nothing of have done nothing.
func TestRun_RefusesMessagesWithoutATopic(t *testing.T) {
	t.Parallel()
	c, tried := stock(), make(chan struct{}, 100)
	broker := &channel{messages: make(chan *message.Message)}
	c.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return broker, nil }
	c.Inbox.Retry = inbox.Retry{Tries: 1, Deliveries: 1}
	c.Handler = func(*message.Message) ([]*message.Message, error) {
		tried <- struct{}{}
		return []*message.Message{message.NewMessage("answer", nil)}, nil
	}
	m := newMill(t, testserver.SQLite(t), mill.Config{Consumers: []mill.Consumer{c}})
	stop := run(t, m)
	broker.messages <- message.NewMessage("order 1", nil)
	<-tried
	eventually(t, "it is a dead letter", func() bool { return strings.Contains(lastError(t, m), "Produces") })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestRun_StopsEverythingWhenAPartFails(t *testing.T) {
	t.Parallel()
	broken, stopped := errors.New("broken"), make(chan struct{})
	m := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}, Sink: relay.FromPublisher(&channel{}), Consumers: []mill.Consumer{stock()}})
	err := m.Run(t.Context(),
		func(context.Context) error { return nil }, // has done its work
		func(ctx context.Context) error {
			<-ctx.Done()
			close(stopped)
			return nil
		},
		func(ctx context.Context) error {
			testserver.Poll(ctx, func() bool { return m.Ready() == nil })
			return broken
		})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "argument 3 of Run") {
		t.Errorf("got %v", err)
	}
	<-stopped
}

func TestRun_ReportsAPanic(t *testing.T) {
	t.Parallel()
	var panicked *oncemill.PanicError
	m := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}})
	if err := m.Run(t.Context(), func(context.Context) error { panic("oops") }); !errors.As(err, &panicked) {
		t.Errorf("got %v", err)
	}
}

// What does not return is named, and keeps nothing else.
func TestRun_NamesPartsThatDoNotReturn(t *testing.T) {
	t.Parallel()
	c, begun, release := stock(), make(chan struct{}), make(chan struct{})
	broker := &channel{messages: make(chan *message.Message)}
	c.Subscriber = func(*inbox.Inbox) (message.Subscriber, error) { return broker, nil }
	c.Handler = func(*message.Message) ([]*message.Message, error) {
		close(begun)
		<-release
		return nil, nil
	}
	m := newMill(t, testserver.SQLite(t), mill.Config{StopTimeout: 50 * time.Millisecond, Consumers: []mill.Consumer{c}})
	stuck := make(chan struct{})
	stop := run(t, m, func(context.Context) error {
		defer close(stuck)
		<-release
		return nil
	})
	broker.messages <- message.NewMessage("order 1", nil)
	<-begun
	err := stop()
	if !errors.Is(err, mill.ErrStillRunning) || !strings.Contains(err.Error(), "argument 1 of Run") || !strings.Contains(err.Error(), "consumer stock") {
		t.Errorf("got %v", err)
	}
	close(release)
	<-stuck
}

func TestServe_WaitsForRequestsInFlight(t *testing.T) {
	t.Parallel()
	listener := testserver.Listen(t)
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	begun, release := make(chan struct{}), make(chan struct{})
	server := &http.Server{Addr: address, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-release
		w.WriteHeader(http.StatusNoContent)
	})}
	m := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}})
	stop := run(t, m, m.Serve(server))
	answered := make(chan error, 1)
	go func() {
		request, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), http.MethodGet, "http://"+address, http.NoBody)
		if err != nil {
			answered <- err
			return
		}
		var response *http.Response
		testserver.Poll(t.Context(), func() bool { // until it listens
			response, err = http.DefaultClient.Do(request)
			return err == nil
		})
		if err == nil && response.StatusCode != http.StatusNoContent {
			err = errors.New(response.Status)
		}
		if response != nil {
			err = errors.Join(err, response.Body.Close())
		}
		answered <- err
	}()
	<-begun
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	eventually(t, "it is stopping", func() bool { return errors.Is(m.Ready(), mill.ErrNotRunning) })
	close(release)
	if err := errors.Join(<-answered, <-ended); err != nil {
		t.Error(err)
	}
	http.DefaultClient.CloseIdleConnections()
	// Two of one address: the second one says so.
	other := testserver.Listen(t)
	taken := newMill(t, testserver.SQLite(t), mill.Config{Outbox: &outbox.Config{}})
	if err := taken.Run(t.Context(), taken.Serve(&http.Server{Addr: other.Addr().String(), ReadHeaderTimeout: time.Minute})); err == nil || !strings.Contains(err.Error(), other.Addr().String()) {
		t.Errorf("an address that is taken: %v", err)
	}
}
