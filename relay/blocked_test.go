package relay_test

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// gauge returns a gauge's values by their application.
func (m *telemetry) gauge(t testing.TB, name string) map[string]float64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(context.WithoutCancel(t.Context()), &all); err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			if g, ok := metric.Data.(metricdata.Gauge[float64]); ok && metric.Name == name {
				for _, point := range g.DataPoints {
					application, _ := point.Attributes.Value(attribute.Key("application"))
					values[application.AsString()] = point.Value
				}
			}
		}
	}
	return values
}

// An operator sees who keeps dead rows in the tables, while it lasts.
func TestRelay_MeasuresWhoHoldsTheTables(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t, "autovacuum=off")
	p := onServer(t, server)
	p.execute(t, `insert into {{outbox}} (lane, topic, message_id, payload) select 1, 'orders', 'dead', decode(repeat('ab', 1500), 'hex') from generate_series(1, 6000)`)
	p.execute(t, `delete from {{outbox}}`)
	p.execute(t, `select setval('{{outbox_id}}', 65536)`)
	dump, err := server.Open("application_name=dump").BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dump.Rollback()
	if _, err := dump.ExecContext(t.Context(), database.Of(p.cfg).Expand(`lock table {{outbox}} in access share mode; create table held (id int)`)); err != nil {
		t.Fatal(err)
	}
	w := &wire{}
	r := start(t, p.box(t), &sink{name: "w", wire: w}, unhurried)
	eventually(t, "the dump is named", func() bool {
		return r.gauge(t, "oncemill.relay.ring_blocked")["dump"] > 0 && r.gauge(t, "oncemill.relay.oldest_snapshot")["dump"] > 0
	})
	if err := dump.Rollback(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ring is truncated", func() bool { return r.counter(t, "oncemill.relay.ring_truncated") == 1 })
	eventually(t, "nobody is named", func() bool { return len(r.gauge(t, "oncemill.relay.ring_blocked")) == 0 })
	r.stop()
	if got := r.gauge(t, "oncemill.relay.oldest_snapshot"); len(got) != 0 {
		t.Errorf("a relay that has stopped says %v", got)
	}
}
