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

func (m *telemetry) outcomes(t testing.TB, outcome string) int {
	t.Helper()
	return m.counter(t, "oncemill.relay.outcomes", outcome)
}
