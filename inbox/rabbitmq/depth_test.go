package rabbitmq_test

import (
	"log/slog"
	"maps"
	"sync/atomic"
	"testing"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

// depths collects the metric, and returns its values by the queue.
func depths(t *testing.T, reader *sdk.ManualReader) map[string]int64 {
	t.Helper()
	return depthsBy(t, reader, "messaging.destination.subscription.name")
}

func depthsBy(t *testing.T, reader *sdk.ManualReader, attribute attribute.Key) map[string]int64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]int64{}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			data, ok := metric.Data.(metricdata.Gauge[int64])
			if metric.Name != "oncemill.inbox.queue_depth" || !ok {
				continue
			}
			for _, p := range data.DataPoints {
				value, _ := p.Attributes.Value(attribute)
				found[value.AsString()] = p.Value
			}
		}
	}
	return found
}

func metered() (*sdk.ManualReader, rabbitmq.Config) {
	reader := sdk.NewManualReader()
	return reader, rabbitmq.Config{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader))}
}

// What waits in a queue is measured, without what is in flight.
func TestDepth_IsWhatWaitsInEachQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	reader, cfg := metered()
	s := subscriber(t, queues(uri, 2), cfg)
	for queue, n := range map[string]int{"orders": 9, "invoices": 2} {
		a.declare(queue, nil)
		for range n {
			a.publish(queue, publishing("m", ""))
		}
		subscribe(t, s, queue) // takes no more than its prefetch of 2
	}
	want := map[string]int64{"orders": 7, "invoices": 0}
	eventually(t, "what waits is measured", func() bool { return maps.Equal(depths(t, reader), want) })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if found := depths(t, reader); len(found) > 0 {
		t.Errorf("after Close: %v", found)
	}
}

// A queue of several topics has one series, the same at each reading.
func TestDepth_OfAQueueOfSeveralTopicsHasOneSeries(t *testing.T) {
	t.Parallel()
	reader, cfg := metered()
	s := subscriber(t, wamqp.NewDurablePubSubConfig(testserver.RabbitMQ(t), wamqp.GenerateQueueNameConstant("stock")), cfg)
	for _, topic := range []string{"f", "c", "b", "a", "d", "e"} {
		subscribe(t, s, topic)
	}
	eventually(t, "the queue is measured under its first topic", func() bool {
		found := depthsBy(t, reader, "messaging.destination.name")
		if _, first := found["a"]; len(found) > 1 || len(found) == 1 && !first {
			t.Fatalf("found %v", found)
		}
		return len(found) == 1
	})
}

// The broker logs an error for each question about a queue that it does not know. So it is not asked
// for one whose name it chooses, which only the channel of the consumer knows.
func TestDepth_IsNotAskedForWithoutAName(t *testing.T) {
	t.Parallel()
	proxy, uri := testserver.ProxyAMQP(t, testserver.RabbitMQ(t))
	reader, cfg := metered()
	out := subscribe(t, subscriber(t, wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameConstant("")), cfg), "orders")
	for range 10 {
		depths(t, reader)
		none(t, out)
	}
	if n := proxy.Dials.Load(); n != 1 {
		t.Errorf("%d connections, want that of the consumer", n)
	}
}

// writes counts them.
type writes struct{ atomic.Int64 }

func (w *writes) Write(p []byte) (int, error) {
	w.Add(1)
	return len(p), nil
}

// A queue that is exclusive to the connection of its consumer has no value, and that is no failure.
func TestDepth_OfAnExclusiveQueueIsNotKnown(t *testing.T) {
	t.Parallel()
	exclusive := queues(testserver.RabbitMQ(t), 2)
	exclusive.Queue.Exclusive = true
	reader, cfg := metered()
	var warnings writes
	cfg.Logger = slog.New(slog.NewTextHandler(&warnings, &slog.HandlerOptions{Level: slog.LevelWarn}))
	out := subscribe(t, subscriber(t, exclusive, cfg), "orders")
	for range 30 {
		if found := depths(t, reader); len(found) > 0 {
			t.Fatalf("found %v", found)
		}
		none(t, out)
	}
	if n := warnings.Load(); n > 0 {
		t.Errorf("%d warnings", n)
	}
}

// A silent broker leaves no stale value, and does not hold up Close.
func TestDepth_IsNotKnownWhileTheBrokerIsSilent(t *testing.T) {
	t.Parallel()
	proxy, uri := testserver.ProxyAMQP(t, testserver.RabbitMQ(t))
	reader, cfg := metered()
	s := subscriber(t, queues(uri, 2), cfg)
	subscribe(t, s, "orders")
	measured := func() bool { return len(depths(t, reader)) == 1 }
	eventually(t, "the queue is measured", measured)
	proxy.Frozen.Store(true)
	eventually(t, "the value is gone", func() bool { return !measured() })
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A queue that does not answer has no value, nor has one that the broker answers for without
// knowing: a quorum queue without a leader has zeros. They cost no other queue its value.
func TestDepth_OfOneQueueDoesNotDependOnOthers(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t)
	a := newAdmin(t, node.URI())
	quorum := amqp091.Table{"x-queue-type": "quorum"}
	of := func(args amqp091.Table) wamqp.Config {
		cfg := queues(node.URI(), 1)
		cfg.Queue.Arguments = args
		return cfg
	}
	reader, cfg := metered()
	for queue, args := range map[string]amqp091.Table{"a-silent": nil, "b-leaderless": quorum, "c-quorum": quorum, "d-classic": nil} {
		a.declare(queue, args)
		for range 3 {
			a.publish(queue, publishing("m", ""))
		}
	}
	classic, leaders := subscriber(t, of(nil), cfg), subscriber(t, of(quorum), cfg)
	subscribe(t, classic, "a-silent")
	subscribe(t, classic, "d-classic")
	subscribe(t, leaders, "b-leaderless")
	subscribe(t, leaders, "c-quorum")
	eventually(t, "all are measured", func() bool {
		return maps.Equal(depths(t, reader), map[string]int64{"a-silent": 2, "b-leaderless": 2, "c-quorum": 2, "d-classic": 2})
	})
	eval := func(queue, act string) {
		node.Eval(`{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"` + queue + `">>)), Pid = amqqueue:get_pid(Q), ` + act)
	}
	eval("b-leaderless", "{Name, _} = Pid, ra:stop_server(quorum_queues, {Name, node()})")
	eval("a-silent", "sys:suspend(Pid)")
	eventually(t, "the others are measured", func() bool {
		return maps.Equal(depths(t, reader), map[string]int64{"c-quorum": 2, "d-classic": 2})
	})
	eval("a-silent", "sys:resume(Pid)")
}
