package relay_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// points returns the counts of a histogram's points, by their attributes.
func (m *telemetry) points(t testing.TB, name string) map[string]uint64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(context.WithoutCancel(t.Context()), &all); err != nil {
		t.Fatal(err)
	}
	points := map[string]uint64{}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			data, ok := metric.Data.(metricdata.Histogram[float64])
			if metric.Name != name || !ok {
				continue
			}
			for _, p := range data.DataPoints {
				var attrs []string
				for _, attr := range p.Attributes.ToSlice() {
					attrs = append(attrs, string(attr.Key)+"="+attr.Value.String())
				}
				points[strings.Join(attrs, " ")] = p.Count
			}
		}
	}
	return points
}

func publish(t testing.TB, box *outbox.Outbox, topic string, messages ...*message.Message) {
	t.Helper()
	err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error { return box.Publish(ctx, tx, topic, messages...) })
	if err != nil {
		t.Fatal(err)
	}
}

func TestRelay_MeasuresEachPublishByTopicAndOutcome(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	var tries atomic.Int32
	m := start(t, box, &sink{name: "w", wire: &wire{}, handle: func(_ context.Context, m *relay.Message) error {
		if m.Topic == "orders" && tries.Add(1) == 1 {
			return relay.Unavailable(errors.New("not yet"))
		}
		return nil
	}}, relay.Config{})
	publish(t, box, "orders", message.NewMessage("a", nil))
	publish(t, box, "payments", message.NewMessage("b", nil))
	p.awaitNothingOwed(t)
	const of = " messaging.operation.name=send messaging.operation.type=send messaging.system=oncemill"
	testserver.Eventually(t, "three outcomes are measured", func() bool {
		got := m.points(t, "messaging.client.operation.duration")
		return len(got) == 3 && got["messaging.destination.name=orders"+of] == 1 && got["messaging.destination.name=payments"+of] == 1 &&
			got["error.type=unavailable messaging.destination.name=orders"+of] == 1
	})
}

// Topics that a service makes up (reply.<id>) must not make a time series each.
func TestRelay_PoolsTheTopicsBeyondTheFirst(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	m := start(t, box, &sink{name: "w", wire: &wire{}}, relay.Config{})
	for i := range 300 {
		publish(t, box, fmt.Sprint("reply.", i), message.NewMessage(fmt.Sprint(i), nil))
	}
	p.awaitNothingOwed(t)
	testserver.Eventually(t, "300 publishes are measured", func() bool {
		n := uint64(0)
		for _, count := range m.points(t, "messaging.client.operation.duration") {
			n += count
		}
		return n == 300
	})
	if got := m.points(t, "messaging.client.operation.duration"); len(got) != 201 {
		t.Errorf("%d time series, want 200 and the rest", len(got))
	}
}

func TestRelay_CountsOpenCircuits(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	var fixed atomic.Bool
	m := start(t, box, &sink{name: "w", wire: &wire{}, handle: func(_ context.Context, m *relay.Message) error {
		if m.Topic == "orders" && !fixed.Load() {
			return relay.Unavailable(errors.New("not yet"))
		}
		return nil
	}}, relay.Config{})
	publish(t, box, "orders", message.NewMessage("a", nil))
	count := func(n float64) func() bool {
		return func() bool {
			got, found := m.gaugeSum(t, "oncemill.relay.circuits")
			return found && got == n
		}
	}
	testserver.Eventually(t, "a circuit is open", count(1))
	fixed.Store(true)
	testserver.Eventually(t, "no circuit is open", count(0))
}

// A message carries the time of its insert, by the database's clock, to any sink.
func TestRelay_SendsTheTimeOfTheInsert(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	sent := make(chan *relay.Message, 1)
	start(t, box, &sink{name: "w", wire: &wire{}, handle: func(_ context.Context, m *relay.Message) error {
		select {
		case sent <- m:
		default:
		}
		return nil
	}}, relay.Config{})
	before := time.Now().Add(-time.Second)
	publish(t, box, "orders", message.NewMessage("a", nil))
	m := <-sent
	at, err := time.Parse(time.RFC3339Nano, m.Watermill().Metadata[outbox.CreatedAtMetadata])
	if err != nil || !at.Equal(m.CreatedAt) || at.Before(before) || at.After(time.Now().Add(time.Second)) {
		t.Errorf("sent %q, %v; created at %v", m.Watermill().Metadata[outbox.CreatedAtMetadata], err, m.CreatedAt)
	}
	// A consumer that passes the message on does not pass on its time.
	again := message.NewMessage("b", nil)
	again.Metadata = m.Watermill().Metadata
	p.awaitNothingOwed(t)
	publish(t, box, "orders", again)
	if next := <-sent; !next.CreatedAt.After(m.CreatedAt) || next.Watermill().Metadata[outbox.CreatedAtMetadata] == m.Watermill().Metadata[outbox.CreatedAtMetadata] {
		t.Errorf("passed on with the time %q", next.Watermill().Metadata[outbox.CreatedAtMetadata])
	}
}

// While services are upgraded, a consumer of an older build passes on what a new relay has
// sent. Its Publish refuses reserved names that it does not know.
func TestRelay_SendsNoNameThatAnOlderPublishRefuses(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	box := p.box(t)
	sent := make(chan *relay.Message, 1)
	start(t, box, &sink{name: "w", wire: &wire{}, handle: func(_ context.Context, m *relay.Message) error {
		select {
		case sent <- m:
		default:
		}
		return nil
	}}, relay.Config{})
	msg := message.NewMessage("a", nil)
	outbox.SetKey(msg, "k")
	publish(t, box, "orders", msg)
	m := <-sent
	if m.Watermill().Metadata[outbox.CreatedAtMetadata] == "" {
		t.Errorf("sent %v", m.Watermill().Metadata)
	}
	known := []string{"oncemill_key", "oncemill_id", "oncemill_deliver_at", "oncemill_deliver_after", "oncemill_encoding", "oncemill_signature", "oncemill_topic"}
	for name := range m.Watermill().Metadata {
		if strings.HasPrefix(name, outbox.ReservedMetadata) && !slices.Contains(known, name) {
			t.Errorf("sent the name %q", name)
		}
	}
}
