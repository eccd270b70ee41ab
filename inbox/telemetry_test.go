package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/oncemill/oncemill/inbox"
)

func TestInbox_CountsAttemptsByOutcome(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		counters := &recordingProvider{counts: map[string]int64{}}
		var log bytes.Buffer
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.MeterProvider = counters
			cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		})
		expectNoError(t, deliverMessage(t, in, routed(t, "a", "results"), effect))
		for range 2 {
			expectNoError(t, deliver(t, in, "a", effect))
		}
		expectError(t, deliver(t, in, "b", func(*message.Message) ([]*message.Message, error) { return nil, errUndo }), errUndo)
		if err := deliver(t, in, "", effect); err == nil {
			t.Error("no error")
		}
		want := map[string]int64{
			`oncemill.inbox.handled messaging.consumer.group.name=stock messaging.destination.name=orders`: 1,
			`oncemill.inbox.duplicates messaging.consumer.group.name=stock`:                                2,
			`oncemill.inbox.failed error.type=handler messaging.consumer.group.name=stock`:                 1,
			`oncemill.inbox.failed error.type=message_id messaging.consumer.group.name=stock`:              1,
		}
		if got := counters.counts; !maps.Equal(got, want) {
			t.Errorf("counted %v", got)
		}
		if n := strings.Count(log.String(), `msg="duplicate acknowledged" consumer=stock message_id=a`); n != 2 {
			t.Errorf("logged %s", log.String())
		}
	})
}

func TestNew_ReportsCountersThatCannotBeMade(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, MeterProvider: failingProvider{}})
		expectError(t, err, errNoCounter)
	})
}

// recordingProvider makes counters that can be read.
type recordingProvider struct {
	noop.MeterProvider

	mu     sync.Mutex
	counts map[string]int64
}

func (p *recordingProvider) Meter(string, ...metric.MeterOption) metric.Meter {
	return recordingMeter{provider: p}
}

type recordingMeter struct {
	noop.Meter
	provider *recordingProvider
}

func (m recordingMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return recordingCounter{provider: m.provider, name: name}, nil
}

type recordingCounter struct {
	noop.Int64Counter
	provider *recordingProvider
	name     string
}

func (c recordingCounter) Add(_ context.Context, n int64, options ...metric.AddOption) {
	c.provider.mu.Lock()
	defer c.provider.mu.Unlock()
	key := c.name
	attrs := metric.NewAddConfig(options).Attributes()
	for _, attr := range attrs.ToSlice() {
		key += " " + string(attr.Key) + "=" + attr.Value.String()
	}
	c.provider.counts[key] += n
}

var errNoCounter = errors.New("no counter")

type failingProvider struct{ noop.MeterProvider }

func (failingProvider) Meter(string, ...metric.MeterOption) metric.Meter { return failingMeter{} }

type failingMeter struct{ noop.Meter }

func (failingMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return nil, errNoCounter
}
