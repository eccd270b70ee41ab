package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// One process serves requests in transactions on SQLite, publishes, and relays. Nobody
// starves: everything is relayed while the load lasts, no lease is lost, and whoever
// waits returns when its context ends.
func TestSQLite_IsFairUnderSlowHandlers(t *testing.T) {
	t.Parallel()
	type load struct {
		requests int
		handler  time.Duration
	}
	few := []load{{8, 200 * time.Millisecond}, {50, 50 * time.Millisecond}}
	for _, load := range testserver.Rounds(few, append(few, load{8, 50 * time.Millisecond}, load{50, 200 * time.Millisecond})) {
		t.Run(fmt.Sprintf("%d requests of %v", load.requests, load.handler), func(t *testing.T) {
			t.Parallel() // each on a file of its own; most of the time handlers sleep
			f := newFair(t)
			stop := f.relay(t)
			f.load(t, load.requests, load.handler)
			f.check(t)
			stop()
		})
	}
}

// fairFor is how long each load lasts.
func fairFor() time.Duration {
	if long {
		return 2 * time.Minute
	}
	return 3 * time.Second
}

// fair is a service on SQLite: an API, producers and a relay.
type fair struct {
	db     *sql.DB
	box    *outbox.Outbox
	engine *idempotency.Engine
	sink   *lagSink

	committed atomic.Int64 // messages
	answered  atomic.Int64 // requests, with success
	leases    leaseLog

	mu    sync.Mutex      // guards what follows
	waits []time.Duration // of producers
	late  []time.Duration // beyond their contexts
}

// lagSink confirms everything and keeps how old it was.
type lagSink struct {
	mu   sync.Mutex // guards lags
	lags []time.Duration
}

func (s *lagSink) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (s *lagSink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	now := time.Now()
	for _, m := range msgs {
		s.mu.Lock()
		s.lags = append(s.lags, now.Sub(committedAt(m.Metadata)))
		s.mu.Unlock()
		done(m, nil)
	}
}

const committedKey = "committed"

// committedAt is when the transaction of a message was about to commit.
func committedAt(metadata message.Metadata) time.Time {
	nanos, err := strconv.ParseInt(metadata.Get(committedKey), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(0, nanos)
}

func stamped() *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), make([]byte, 256))
	msg.Metadata.Set(committedKey, strconv.FormatInt(time.Now().UnixNano(), 10))
	return msg
}

// leaseLog keeps what a relay says of its leases as a warning.
type leaseLog struct {
	mu      sync.Mutex // guards entries
	entries []string
}

func (l *leaseLog) Handle(_ context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn && strings.Contains(r.Message, "lease") {
		l.mu.Lock()
		defer l.mu.Unlock()
		r.Attrs(func(a slog.Attr) bool { r.Message += " " + a.String(); return true })
		l.entries = append(l.entries, r.Message)
	}
	return nil
}

func (l *leaseLog) Enabled(context.Context, slog.Level) bool { return true }
func (l *leaseLog) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *leaseLog) WithGroup(string) slog.Handler            { return l }

func newFair(t *testing.T) *fair {
	t.Helper()
	f := &fair{db: testserver.SQLite(t), sink: &lagSink{}}
	err := oncemill.Migrate(t.Context(), f.db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, idempotency.Migrations)
	if err != nil {
		t.Fatal(err)
	}
	execute(t, f.db, `create table orders (id integer primary key, name text not null)`)
	if f.box, err = outbox.New(f.db, outbox.Config{}); err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(f.db, idempotency.StoreConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if f.engine, err = idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant(), Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	return f
}

// relay runs a relay as it is configured by default, but for the time that a slow machine may
// take to stop.
func (f *fair) relay(t *testing.T) (stop func()) {
	t.Helper()
	r, err := relay.New(f.box, f.sink, relay.Config{Logger: slog.New(&f.leases), StopTimeout: 2 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	eventually(t, "the relay has all lanes", func() bool {
		return count(t, f.db, `select count(*) from oncemill_relay_leases where owner <> ''`) == outbox.Lanes+1
	})
	return stop
}

// The lease of the upkeep (-1) is given up where a call had no answer for a third of a lease,
// which a busy machine brings about, and taken again; no message here waits for it.
func (f *fair) epochs(t *testing.T) []string {
	t.Helper()
	return testserver.Texts(t, f.db, `select lane || ' ' || owner || ' ' || epoch from oncemill_relay_leases where lane >= 0 order by lane`)
}

// load has clients and two producers at work for a time.
func (f *fair) load(t *testing.T, clients int, handler time.Duration) {
	t.Helper()
	server := httptest.NewServer(f.engine.TxMiddleware(f.handler(handler)))
	defer server.Close()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	defer client.CloseIdleConnections()
	before := f.epochs(t)
	ctx, cancel := context.WithTimeout(t.Context(), fairFor())
	defer cancel()
	var working sync.WaitGroup
	for range clients {
		working.Go(func() {
			for ctx.Err() == nil {
				f.post(context.WithoutCancel(ctx), t, client, server.URL)
			}
		})
	}
	for range 2 {
		working.Go(func() {
			for ctx.Err() == nil {
				f.produce(context.WithoutCancel(ctx), t, 5*time.Second)
			}
		})
	}
	<-ctx.Done()
	delivered := f.sink.count()
	t.Logf("relayed under load: %d of %d", delivered, f.committed.Load())
	working.Wait()
	if after := f.epochs(t); !slices.Equal(before, after) {
		t.Errorf("leases changed:\n%v\n%v", before, after)
	}
}

func (s *lagSink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.lags)
}

func (f *fair) handler(takes time.Duration) http.Handler {
	publisher := f.box.ContextPublisher()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := oncemill.TxFromContext(r.Context())
		if _, err := tx.ExecContext(r.Context(), `insert into orders (name) values ('one')`); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		testserver.Pause(r.Context(), takes)
		msg := stamped()
		msg.SetContext(r.Context())
		if err := publisher.Publish("orders", msg); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
}

func (f *fair) post(ctx context.Context, t *testing.T, client *http.Client, url string) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader("{}"))
	if err != nil {
		t.Error(err)
		return
	}
	request.Header.Set("Idempotency-Key", watermill.NewUUID())
	response, err := client.Do(request)
	if err != nil {
		t.Error(err)
		return
	}
	_ = response.Body.Close()
	if response.StatusCode == http.StatusCreated {
		f.answered.Add(1)
		f.committed.Add(1)
	}
}

// produce publishes one message, within a time.
func (f *fair) produce(ctx context.Context, t *testing.T, within time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	begin := time.Now()
	err := f.box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		return f.box.Publisher(tx).Publish("orders", stamped())
	})
	took := time.Since(begin)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err == nil {
		f.committed.Add(1)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waits = append(f.waits, took)
	if took > within {
		f.late = append(f.late, took-within)
	}
}

// moving waits for what must come, as long as anything is relayed.
func (f *fair) moving(t *testing.T, what string, condition func() bool) {
	t.Helper()
	testserver.EventuallyMoving(t, what, condition, f.sink.count)
}

// check waits until nothing is owed and compares figures with what is promised.
func (f *fair) check(t *testing.T) {
	t.Helper()
	f.moving(t, "nothing is owed", func() bool {
		return count(t, f.db, `select count(*) from oncemill_outbox`) == 0
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sink.mu.Lock()
	defer f.sink.mu.Unlock()
	slices.Sort(f.waits)
	slices.Sort(f.sink.lags)
	slices.Sort(f.late)
	t.Logf("%d requests answered, %d messages committed, %d relayed; lag p50 %v, p99 %v, most %v; %d publishes, p50 %v, p99 %v, most %v; %d late",
		f.answered.Load(), f.committed.Load(), len(f.sink.lags),
		quantile(f.sink.lags, 0.5), quantile(f.sink.lags, 0.99), quantile(f.sink.lags, 1),
		len(f.waits), quantile(f.waits, 0.5), quantile(f.waits, 0.99), quantile(f.waits, 1), len(f.late))
	if got, want := len(f.sink.lags), int(f.committed.Load()); got != want {
		t.Errorf("%d messages relayed, %d committed", got, want)
	}
	if !long { // the times of a few seconds are those of the machine
		return
	}
	f.leases.mu.Lock()
	defer f.leases.mu.Unlock()
	for _, entry := range f.leases.entries {
		t.Errorf("the relay says: %s", entry)
	}
	if p99 := quantile(f.sink.lags, 0.99); p99 > 5*time.Second {
		t.Errorf("a message in a hundred was relayed %v after its commit", p99)
	}
	if worst := quantile(f.late, 1); worst > time.Second {
		t.Errorf("a producer waited for %v longer than its context", worst)
	}
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Truncate(100 * time.Microsecond)
}

// A backlog is delivered while others publish: their transactions come between the
// relay's, which are bounded by the time that they keep others waiting.
func TestSQLite_ProducersPassABacklog(t *testing.T) {
	t.Parallel()
	rows := testserver.Rounds(4000, 300_000)
	f := newFair(t)
	f.fill(t, rows)
	stop := f.relay(t)
	begin := time.Now()
	producing, stopProducing := context.WithCancel(t.Context())
	defer stopProducing()
	var working sync.WaitGroup
	working.Go(func() {
		for producing.Err() == nil {
			f.produce(context.WithoutCancel(producing), t, 5*time.Second)
			testserver.Pause(producing, 10*time.Millisecond) // a producer, not a flood
		}
	})
	f.moving(t, "the backlog is delivered", func() bool { return f.sink.count() >= rows })
	took := time.Since(begin)
	stopProducing()
	working.Wait()
	t.Logf("%d rows in %v, %.0f/s", rows, took.Truncate(time.Millisecond), float64(rows)/took.Seconds())
	stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.Sort(f.waits)
	t.Logf("%d publishes, p50 %v, p99 %v, most %v, %d late",
		len(f.waits), quantile(f.waits, 0.5), quantile(f.waits, 0.99), quantile(f.waits, 1), len(f.late))
	if p99 := quantile(f.waits, 0.99); long && p99 > 250*time.Millisecond {
		t.Errorf("a publish in a hundred took %v", p99)
	}
}

// fill commits a backlog.
func (f *fair) fill(t *testing.T, rows int) {
	t.Helper()
	const batch = 2000
	for done := 0; done < rows; done += batch {
		msgs := make([]*message.Message, min(batch, rows-done))
		for i := range msgs {
			msgs[i] = stamped()
		}
		err := f.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
			return f.box.Publisher(tx).Publish("orders", msgs...)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
