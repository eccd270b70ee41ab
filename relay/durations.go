package relay

import (
	"context"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill/internal/labels"
)

// durations records how long the sink takes for a message. Only the loop of a worker uses
// it; topics is that of all workers of a relay.
type durations struct {
	histogram metric.Float64Histogram
	topics    *labels.Set
	known     map[durationLabel]metric.RecordOption // making a set costs more than recording
}

type durationLabel struct{ topic, outcome string }

func newDurations(m *metrics) durations {
	return durations{histogram: m.duration, topics: &m.topics, known: map[durationLabel]metric.RecordOption{}}
}

// durationBounds are those that the semantic conventions recommend, in seconds.
var durationBounds = []float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}

// record takes the outcome of a message that is still in flight.
func (d durations) record(ctx context.Context, m *entry, now time.Time, err error) {
	if m.handed.IsZero() || !d.histogram.Enabled(ctx) {
		return
	}
	l := durationLabel{topic: d.topics.Of(m.Topic)}
	if err != nil {
		l.outcome = outcomeOf(err)
	}
	option, ok := d.known[l]
	if !ok {
		attrs := []attribute.KeyValue{
			attribute.String("messaging.system", "oncemill"),
			attribute.String("messaging.operation.name", "send"),
			attribute.String("messaging.operation.type", "send"),
			attribute.String("messaging.destination.name", l.topic),
		}
		if l.outcome != "" {
			attrs = append(attrs, attribute.String("error.type", l.outcome))
		}
		option = metric.WithAttributeSet(attribute.NewSet(attrs...))
		d.known[l] = option
	}
	d.histogram.Record(ctx, now.Sub(m.handed).Seconds(), option)
}

// circuitGauge counts the circuits of all workers of a relay.
type circuitGauge struct{ open, halfOpen, sinks atomic.Int64 }

func (g *circuitGauge) register(meter metric.Meter) error {
	_, err := meter.Int64ObservableGauge("oncemill.relay.circuits", metric.WithUnit("{circuit}"),
		metric.WithDescription("Circuits that are not closed, by state and by whether they are of a topic or of the sink."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(g.open.Load(), circuitLabel("open", "topic"))
			o.Observe(g.halfOpen.Load(), circuitLabel("half_open", "topic"))
			o.Observe(g.sinks.Load(), circuitLabel("open", "sink"))
			return nil
		}))
	return err
}

func circuitLabel(state, of string) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(attribute.String("state", state), attribute.String("of", of)))
}

// circuitCount is the part of one worker in the gauge. The loop counts at most once a second:
// in an outage there may be very many topics.
type circuitCount struct {
	gauge                 *circuitGauge
	next                  time.Time
	open, halfOpen, sinks int64
}

func (n *circuitCount) count(c *circuits, now time.Time) {
	if now.Before(n.next) {
		return
	}
	n.next = now.Add(time.Second)
	var open, halfOpen, sinks int64
	for _, t := range c.topics {
		switch t.state {
		case circuitOpen:
			open++
		case circuitHalfOpen:
			halfOpen++
		case circuitClosed:
		}
	}
	if c.sinkDown {
		sinks = 1
	}
	n.set(open, halfOpen, sinks)
}

func (n *circuitCount) set(open, halfOpen, sinks int64) {
	n.gauge.open.Add(open - n.open)
	n.gauge.halfOpen.Add(halfOpen - n.halfOpen)
	n.gauge.sinks.Add(sinks - n.sinks)
	n.open, n.halfOpen, n.sinks = open, halfOpen, sinks
}
