package rabbitmq_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// path is a whole way: an outbox, a relay at work, and its sink.
type path struct {
	box       *outbox.Outbox
	sink      *rabbitmq.Sink
	reader    *sdk.ManualReader
	end       func()             // stops the relay, before the test ends
	next      int                // number of the next message
	committed []*message.Message // and not received
}

// startPath runs a relay from the database to the queue "orders" of a RabbitMQ
// until the test ends.
func startPath(t testing.TB, db *sql.DB, cfg oncemill.Config, uri string, adjust ...func(*relay.Config)) *path {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: cfg, History: outbox.NoHistory, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	sink, err := rabbitmq.New(queues(uri), rabbitmq.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	p := &path{box: box, sink: sink, reader: sdk.NewManualReader()}
	settings := relay.Config{
		Lease: 6 * time.Second, Window: 256, Logger: quiet,
		MeterProvider: sdk.NewMeterProvider(sdk.WithReader(p.reader)),
	}
	for _, f := range adjust {
		f(&settings)
	}
	r, err := relay.New(box, sink, settings)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	group.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	p.end = func() { cancel(); group.Wait() }
	t.Cleanup(p.end)
	return p
}

// commit publishes the next n messages, spread over 40 keys.
func (p *path) commit(t testing.TB, n int) {
	t.Helper()
	var msgs []*message.Message
	for range n {
		i := p.next
		p.next++
		m := message.NewMessage(fmt.Sprint("message ", i), []byte("payload"))
		m.Metadata.Set("number", fmt.Sprint(i))
		outbox.SetKey(m, fmt.Sprint("key ", i%40))
		msgs = append(msgs, m)
	}
	err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		return p.box.Publisher(tx).Publish("orders", msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
	p.committed = append(p.committed, msgs...)
}

func (p *path) owed(t testing.TB) (n int) {
	t.Helper()
	if err := p.box.DB().QueryRowContext(t.Context(), `select count(*) from `+database.Of(p.box.Config().Database).Table("outbox")).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// outcomes returns how many outcomes of a kind the relay has counted.
func (p *path) outcomes(t testing.TB, kind string) (n int) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := p.reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			sum, ok := m.Data.(metricdata.Sum[int64])
			if !ok || m.Name != "oncemill.relay.outcomes" {
				continue
			}
			for _, point := range sum.DataPoints {
				if value, _ := point.Attributes.Value(attribute.Key("outcome")); value.AsString() == kind {
					n += int(point.Value)
				}
			}
		}
	}
	return n
}

// receive reads everything that was committed with a stock watermill-amqp
// subscriber, checks it and its order, and returns how many messages came again.
func (p *path) receive(t testing.TB, uri string) (repeats int) {
	t.Helper()
	subscriber, err := wamqp.NewSubscriber(queues(uri), watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	defer subscriber.Close()
	received, err := subscriber.Subscribe(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	want, got := map[string][]string{}, map[string][]string{}
	for _, m := range p.committed {
		key := m.Metadata.Get(outbox.KeyMetadata)
		want[key] = append(want[key], m.UUID)
	}
	seen := map[string]int{}
	for len(seen) < len(p.committed) {
		select {
		case m := <-received:
			if m.UUID != "message "+m.Metadata.Get("number") || string(m.Payload) != "payload" {
				t.Errorf("received %s with metadata %v, payload %q", m.UUID, m.Metadata, m.Payload)
			}
			if seen[m.UUID]++; seen[m.UUID] == 1 {
				key := m.Metadata.Get(outbox.KeyMetadata)
				got[key] = append(got[key], m.UUID)
			} else {
				repeats++
			}
			m.Ack()
		case <-time.After(maxWait):
			t.Fatalf("%d of %d received in time", len(seen), len(p.committed))
		}
	}
	for key, messages := range want {
		if !slices.Equal(got[key], messages) {
			t.Errorf("%s: received %v", key, got[key])
		}
	}
	return repeats
}

// RabbitMQ is stopped in the middle of a backlog, for a while, and started again.
func resumesWithoutCountingAFailure(t *testing.T, node *testserver.RabbitServer) {
	outage, backlog := outageTime(3*time.Second), testserver.Rounds(800, 2000)
	declareQueue(t, dialAMQP(t, node.URI()), "orders", nil)
	pg := testserver.Postgres(t)
	p := startPath(t, pg.DB, pg.Config, node.URI())

	p.commit(t, backlog)
	eventually(t, "some are delivered", func() bool { return p.outcomes(t, "confirmed") > 100 })
	node.GoAway()
	p.commit(t, backlog)
	begin, owed := time.Now(), p.owed(t)
	testserver.Pause(t.Context(), outage)
	if n := p.owed(t); n != owed || n < backlog {
		t.Errorf("%d rows are owed after %v without a broker, %d were when it went", n, time.Since(begin), owed)
	}
	if n := p.outcomes(t, "unavailable"); n == 0 {
		t.Error("nothing was unavailable: there was no outage")
	}
	confirmed := p.outcomes(t, "confirmed")
	node.ComeBack()
	ended := time.Now()
	eventually(t, "a message is confirmed", func() bool { return p.outcomes(t, "confirmed") > confirmed })
	took := time.Since(ended)
	t.Logf("%v of outage: the first message is confirmed %v after its end", outage, took.Round(time.Millisecond))
	if testserver.Long() && took > recovery {
		t.Errorf("the first message was confirmed %v after the end", took)
	}
	p.mustHaveSpentNothing(t)
	p.commit(t, 100)
	testserver.EventuallyMoving(t, "nothing is owed", func() bool { return p.owed(t) == 0 }, func() int { return p.owed(t) })
	for _, kind := range []string{"refused", "unknown"} {
		if n := p.outcomes(t, kind); n != 0 {
			t.Errorf("%d messages counted as %s", n, kind)
		}
	}
	if n := p.outcomes(t, "confirmed"); n != len(p.committed) {
		t.Errorf("%d messages counted as confirmed, want %d", n, len(p.committed))
	}
	repeats := p.receive(t, node.URI())
	t.Logf("%d repeats", repeats)
	if repeats > 256 {
		t.Errorf("%d repeats, more than were in flight when the broker went", repeats)
	}
}

// Without their queue messages have no way to go: none counts as delivered, and
// all arrive once the queue is there.
func TestRelay_KeepsWhatIsUnroutable(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) (*sql.DB, oncemill.Config){
		"PostgreSQL": func(t *testing.T) (*sql.DB, oncemill.Config) {
			pg := testserver.Postgres(t)
			return pg.DB, pg.Config
		},
		"SQLite": func(t *testing.T) (*sql.DB, oncemill.Config) { return testserver.SQLite(t), oncemill.Config{} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, cfg := open(t)
			uri := testserver.RabbitMQ(t)
			admin := dialAMQP(t, uri)
			declareQueue(t, admin, "orders", nil)
			p := startPath(t, db, cfg, uri)
			p.commit(t, 80)
			eventually(t, "nothing is owed", func() bool { return p.owed(t) == 0 })
			if n := len(content(t, admin, "orders")); n != 80 {
				t.Errorf("%d messages in the queue", n)
			}

			if _, err := admin.QueueDelete("orders", false, false, false); err != nil {
				t.Fatal(err)
			}
			p.committed = nil
			p.commit(t, 200)
			eventually(t, "tries", func() bool { return p.outcomes(t, "unroutable")+p.outcomes(t, "unavailable") >= 40 })
			if n := p.outcomes(t, "confirmed"); n != 80 {
				t.Errorf("%d counted as confirmed, want the 80 that had a queue", n)
			}
			if n := p.owed(t); n != 200 {
				t.Errorf("%d rows owed, want 200", n)
			}
			if n := p.outcomes(t, "unknown") + p.outcomes(t, "refused"); n != 0 {
				t.Errorf("%d refused or of unknown outcome", n)
			}
			declareQueue(t, admin, "orders", nil)
			eventually(t, "nothing is owed", func() bool { return p.owed(t) == 0 })
			if repeats := p.receive(t, uri); repeats != 0 {
				t.Errorf("%d repeats", repeats)
			}
		})
	}
}
