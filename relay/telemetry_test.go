package relay_test

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// telemetry reads a relay's metrics.
type telemetry struct {
	reader   *sdk.ManualReader
	provider *sdk.MeterProvider
}

func newTelemetry() *telemetry {
	reader := sdk.NewManualReader()
	return &telemetry{reader: reader, provider: sdk.NewMeterProvider(sdk.WithReader(reader))}
}

// counter returns a counter's value, over all its attributes or for one outcome.
func (m *telemetry) counter(t testing.TB, name string, outcome ...string) int {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(context.WithoutCancel(t.Context()), &all); err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			sum, ok := metric.Data.(metricdata.Sum[int64])
			if metric.Name != name || !ok {
				continue
			}
			for _, point := range sum.DataPoints {
				value, _ := point.Attributes.Value(attribute.Key("outcome"))
				if len(outcome) == 0 || value.AsString() == outcome[0] {
					total += point.Value
				}
			}
		}
	}
	return int(total)
}

// gaugeSum returns the sum of a gauge's values; false if it has none.
func (m *telemetry) gaugeSum(t testing.TB, name string) (total float64, found bool) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(context.WithoutCancel(t.Context()), &all); err != nil {
		t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			if metric.Name != name {
				continue
			}
			switch data := metric.Data.(type) {
			case metricdata.Gauge[int64]:
				for _, point := range data.DataPoints {
					total, found = total+float64(point.Value), true
				}
			case metricdata.Gauge[float64]:
				for _, point := range data.DataPoints {
					total, found = total+point.Value, true
				}
			}
		}
	}
	return total, found
}

func (m *telemetry) outcomes(t testing.TB, outcome string) int {
	t.Helper()
	return m.counter(t, "oncemill.relay.outcomes", outcome)
}
