package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// deaf is a configuration in which polling does not help a test.
var deaf = relay.Config{PollMin: time.Minute, PollMax: time.Minute}

var run = testserver.Run

func notifier(t testing.TB, box *outbox.Outbox) (stop func()) {
	t.Helper()
	n, err := outbox.NewNotifier(box)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, n.Run)
}

func listener(t testing.TB, box *outbox.Outbox, dsn string) (stop func()) {
	t.Helper()
	l, err := outbox.NewListener(box, dsn)
	if err != nil {
		t.Fatal(err)
	}
	return run(t, l.Run)
}

// awaitSoon waits for n messages, less than a poll's time.
func (w *wire) awaitSoon(t testing.TB, n int) {
	t.Helper()
	begin := time.Now()
	for w.distinct() < n {
		if time.Since(begin) > deaf.PollMin/2 {
			t.Fatalf("%d messages are there, want %d", w.distinct(), n)
		}
		testserver.Pause(t.Context(), 5*time.Millisecond)
	}
}

// notifications counts what comes on the channel of a database.
func (p testDB) notifications(t testing.TB) (received func() int) {
	t.Helper()
	l := pq.NewListener(p.dsn, time.Second, time.Second, nil)
	if err := l.Listen(p.cfg.Schema + "." + p.cfg.Prefix + "outbox"); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	n := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range l.Notify {
			mu.Lock()
			n++
			mu.Unlock()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

func TestNotify_WakesARelayOfAnotherProcess(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	w, consumer := &wire{}, p.boxOn(t, p.open(t), outbox.NoHistory)
	r := start(t, consumer, &sink{name: "w", wire: w}, deaf)
	producer := p.box(t)
	stop := notifier(t, producer)
	unlisten := listener(t, consumer, p.dsn)
	sent := 0
	send := func() { commit(t, producer, keyed("k", sent, 1)...); sent++ }
	for range 3 {
		send()
		w.awaitSoon(t, sent)
	}
	// Whoever commits in another way says so.
	tx, err := producer.DB().BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := producer.Publisher(tx).Publish("orders", keyed("k", sent, 1)...); err != nil {
		t.Fatal(err)
	}
	sent++
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	producer.Wake()
	w.awaitSoon(t, sent)
	// Without it, everything is as it was: the wake-up of a process reaches no other.
	stop()
	unlisten()
	send()
	r.stop()
	if n := w.distinct(); n != sent-1 {
		t.Errorf("%d messages arrived, want the %d that were notified: the test shows nothing", n, sent-1)
	}
}

func TestNotify_CommitsShareANotification(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	producer := p.box(t)
	received := p.notifications(t)
	begin := time.Now()
	stop := notifier(t, producer)
	const commits = 400
	for i := range commits {
		commit(t, producer, keyed("k", i, 1)...)
	}
	eventually(t, "a notification", func() bool { return received() > 0 })
	stop()
	most := int(time.Since(begin)/(10*time.Millisecond)) + 1
	n := received()
	t.Logf("%d notifications of %d commits", n, commits)
	if n > most || n >= commits {
		t.Errorf("%d notifications of %d commits, at most %d in that time", n, commits, most)
	}
}

// What a Listener hears is not what a Notifier passes on: two processes that have
// both would keep each other awake for ever.
func TestNotify_DoesNotEcho(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	received := p.notifications(t)
	boxes := []*outbox.Outbox{p.boxOn(t, p.open(t), outbox.NoHistory), p.boxOn(t, p.open(t), outbox.NoHistory)}
	var wakes []<-chan struct{}
	for _, box := range boxes {
		wake, stop := outboxqueue.Of(box).Listen()
		defer stop()
		wakes = append(wakes, wake)
		notifier(t, box)
		listener(t, box, p.dsn)
		<-wake // it listens
	}
	commit(t, boxes[0], keyed("k", 0, 1)...)
	<-wakes[1]
	commit(t, boxes[1], keyed("k", 1, 1)...)
	eventually(t, "both are heard", func() bool { return received() >= 2 })
	commit(t, boxes[0], keyed("k", 2, 1)...)
	eventually(t, "the third is heard", func() bool { return received() >= 3 })
	if n := received(); n != 3 {
		t.Errorf("%d notifications of 3 commits", n)
	}
}

// A business transaction must not notify: the lock that a NOTIFY takes at its
// commit is one for the whole cluster.
func TestNotify_IsNotPartOfTheTransaction(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	producer := p.boxOn(t, p.open(t, "application_name=notifying"), outbox.NoHistory)
	producer.DB().SetMaxOpenConns(1)
	received := p.notifications(t)
	notifier(t, producer)
	err := producer.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		if err := producer.Publisher(tx).Publish("orders", keyed("k", 0, 1)...); err != nil {
			return err
		}
		return errors.New("rolled back")
	})
	if err == nil || received() != 0 {
		t.Errorf("%v, %d notifications", err, received())
	}
	commit(t, producer, keyed("k", 1, 1)...)
	eventually(t, "a notification", func() bool { return received() == 1 })
}

func TestListener_HearsAgainAfterItsConnectionWasKilled(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	w, consumer := &wire{}, p.boxOn(t, p.open(t), outbox.NoHistory)
	start(t, consumer, &sink{name: "w", wire: w}, deaf)
	producer := p.box(t)
	notifier(t, producer)
	name := "listener_" + p.cfg.Schema
	listener(t, consumer, withParam(t, p.dsn, "application_name", name))
	sent := 0
	for range 3 {
		commit(t, producer, keyed("k", sent, 1)...)
		sent++
		w.awaitSoon(t, sent)
		eventually(t, "the connection is killed", func() bool {
			return p.count(t, `select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = $1`, name) == 1
		})
		commit(t, producer, keyed("k", sent, 1)...) // while it is away, or not
		sent++
		w.awaitSoon(t, sent)
	}
}

// gate is a way to a server that can be shut.
type gate struct {
	to, from string
	group    sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener
	conns    []net.Conn
}

func (g *gate) open(t testing.TB) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", g.from)
	if err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.listener, g.from = l, l.Addr().String()
	g.group.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return // shut
			}
			out, err := new(net.Dialer).DialContext(context.WithoutCancel(t.Context()), "tcp", g.to)
			if err != nil {
				in.Close()
				continue
			}
			g.mu.Lock()
			g.conns = append(g.conns, in, out)
			g.mu.Unlock()
			g.group.Go(func() { io.Copy(in, out); in.Close() })
			g.group.Go(func() { io.Copy(out, in); out.Close() })
		}
	})
}

func (g *gate) shut() {
	g.mu.Lock()
	if g.listener != nil {
		g.listener.Close()
	}
	for _, c := range g.conns {
		c.Close()
	}
	g.conns = nil
	g.mu.Unlock()
	g.group.Wait()
}

func withParam(t testing.TB, dsn, name, value string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// The notification of a commit is lost with the connection; the wake-up after the
// next LISTEN makes up for it.
func TestListener_WakesForWhatItMissed(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	u, err := url.Parse(p.dsn)
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{to: u.Host, from: "127.0.0.1:0"}
	g.open(t)
	t.Cleanup(g.shut)
	u.Host = g.from
	w, consumer := &wire{}, p.boxOn(t, p.open(t), outbox.NoHistory)
	start(t, consumer, &sink{name: "w", wire: w}, deaf)
	producer := p.box(t)
	notifier(t, producer)
	log := &logbook{}
	loud, err := outbox.New(consumer.DB(), outbox.Config{Database: p.cfg, Logger: slog.New(log)})
	if err != nil {
		t.Fatal(err)
	}
	heard, stop := outboxqueue.Of(loud).Listen() // the same line, to see when it listens
	defer stop()
	listener(t, loud, u.String())
	listener(t, consumer, u.String())
	received := p.notifications(t)
	<-heard
	commit(t, producer, keyed("k", 0, 1)...)
	w.awaitSoon(t, 1)

	g.shut()
	for i := range 5 {
		n := received()
		commit(t, producer, keyed("k", 1+i, 1)...)
		eventually(t, "the notification is sent", func() bool { return received() > n })
	}
	if w.distinct() == 6 {
		t.Error("all messages arrived: the test shows nothing")
	}
	g.open(t)
	w.awaitSoon(t, 6)
	eventually(t, "the return is logged", func() bool { return log.count("notifications work again") == 1 })
	if n := log.count("listening for commits of other processes failed; relays poll"); n != 1 {
		t.Errorf("one outage was logged %d times", n)
	}
}

func TestListener_StopsWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	// One that refuses, and one that takes a connection and says nothing.
	mute, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	refusing, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refusing.Close()
	for _, l := range []net.Listener{mute, refusing} {
		stop := listener(t, p.box(t), fmt.Sprintf("postgres://u:p@%s/d?sslmode=disable", l.Addr()))
		if l == mute {
			conn, err := mute.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		stop()
	}
}

func TestNotifyAndListen_NameEveryBadValue(t *testing.T) {
	t.Parallel()
	good, lite := onPostgres(t).box(t), onSQLite(t).box(t)
	const secret = "postgres://user:secret@%zz/"
	for name, c := range map[string]struct {
		box  *outbox.Outbox
		dsn  string
		want int
	}{"no box": {nil, "postgres://localhost", 1}, "SQLite": {lite, "postgres://localhost", 1}, "no DSN": {good, "", 1}, "bad DSN": {good, secret, 1}, "both": {lite, secret, 2}} {
		_, err := outbox.NewListener(c.box, c.dsn)
		var bad *oncemill.ConfigError
		if !errors.As(err, &bad) || len(splitErrors(err)) != c.want {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the password is shown: %v", name, err)
		}
	}
	for _, box := range []*outbox.Outbox{nil, lite} {
		if _, err := outbox.NewNotifier(box); err == nil {
			t.Error("a notifier was made")
		}
	}
}

func splitErrors(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// A server that is silent keeps no notifier from its end.
func TestNotifier_EndsWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	p := onPostgres(t)
	proxy, db := p.behindProxy(t)
	box := p.boxOn(t, db, outbox.NoHistory)
	stop := notifier(t, box)
	proxy.Silence(func(statement string) bool { return strings.HasPrefix(statement, "select pg_notify(") }, math.MaxInt)
	commit(t, box, unkeyed(1)...)
	eventually(t, "a notification has no answer", func() bool { return proxy.Silenced() > 0 })
	stop()
}
