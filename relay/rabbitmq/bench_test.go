package rabbitmq_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// BenchmarkPublish compares amqp091-go alone, on one channel with a window of
// pipelined confirms, with the sink, driven over 32 lanes by one goroutine as
// the relay's engine does. Same messages, same queue. Run by hand:
//
//	go test ./relay/rabbitmq -run '^$' -bench Publish -benchtime 100000x -count 3
func BenchmarkPublish(b *testing.B) {
	const queue = "bench"
	uri := testserver.RabbitMQ(b)
	admin := dialAMQP(b, uri)
	messages := benchMessages(b.N)
	var before time.Duration
	fresh := func(b *testing.B) {
		if _, err := admin.QueueDelete(queue, false, false, false); err != nil {
			b.Fatal(err)
		}
		if _, err := admin.QueueDeclare(queue, true, false, false, false, nil); err != nil {
			b.Fatal(err)
		}
		for len(messages) < b.N {
			messages = benchMessages(b.N)
		}
		before = cpuTime(b)
	}
	full := func(b *testing.B) {
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/float64(b.N), "cpu-µs/msg")
		b.ReportMetric(0, "ns/op")
		if q, err := admin.QueueDeclarePassive(queue, true, false, false, false, nil); err != nil || q.Messages != b.N {
			b.Fatalf("%d of %d messages in the queue, %v", q.Messages, b.N, err)
		}
	}
	for _, window := range []int{100, 500, 2000} {
		b.Run(fmt.Sprintf("raw-%d", window), func(b *testing.B) {
			fresh(b)
			b.ReportAllocs()
			benchRaw(b, uri, queue, messages[:b.N], window)
			full(b)
		})
	}
	for _, window := range []int{500, 1024, 4000} {
		b.Run(fmt.Sprintf("sink-%d", window), func(b *testing.B) {
			fresh(b)
			b.ReportAllocs()
			benchSink(b, uri, messages[:b.N], window)
			full(b)
		})
	}
}

// cpuTime is what this process has used so far. On a machine that others use too
// it compares better than the rate.
func cpuTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func benchMessages(n int) []*relay.Message {
	payload := make([]byte, 512)
	messages := make([]*relay.Message, n)
	for i := range messages {
		messages[i] = &relay.Message{
			Lane: i % 32, ID: int64(i), Topic: "bench", Key: fmt.Sprintf("customer-%d", i%10_000),
			MessageID: watermill.NewUUID(), Payload: payload, CreatedAt: time.Now(),
			Metadata: message.Metadata{},
		}
	}
	return messages
}

func benchRaw(b *testing.B, uri, queue string, messages []*relay.Message, window int) {
	conn, err := amqp.Dial(uri)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		b.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		b.Fatal(err)
	}
	returns := ch.NotifyReturn(make(chan amqp.Return, window))
	open := make([]*amqp.DeferredConfirmation, window)
	b.ResetTimer()
	for i, m := range messages {
		if oldest := open[i%window]; oldest != nil && !oldest.Wait() {
			b.Fatal("nacked")
		}
		open[i%window], err = ch.PublishWithDeferredConfirm("", queue, true, false, amqp.Publishing{
			DeliveryMode: amqp.Persistent,
			MessageId:    m.MessageID,
			Type:         m.Topic,
			Timestamp:    m.CreatedAt,
			Headers: amqp.Table{
				"_watermill_message_uuid": m.MessageID,
				"oncemill_key":            m.Key,
				"oncemill_id":             fmt.Sprintf("%d/%d", m.Lane, m.ID),
			},
			Body: m.Payload,
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	for _, dc := range open {
		if dc != nil && !dc.Wait() {
			b.Fatal("nacked")
		}
	}
	b.StopTimer()
	if len(returns) > 0 {
		b.Fatal("returned")
	}
}

// benchSink keeps window messages in the sink, handing over up to 100 of a lane
// at a time.
func benchSink(b *testing.B, uri string, messages []*relay.Message, window int) {
	sink, err := rabbitmq.New(wamqp.NewDurableQueueConfig(uri), rabbitmq.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var group sync.WaitGroup
	group.Go(func() { _ = sink.Run(ctx) })
	defer group.Wait()
	defer cancel()
	testserver.Poll(ctx, sink.Ready)

	var mu sync.Mutex
	var outcomes int
	var failure error
	wake := make(chan struct{}, 1)
	done := func(_ *relay.Message, err error) {
		mu.Lock()
		outcomes++
		if err != nil {
			failure = err
		}
		mu.Unlock()
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	var byLane [32][]*relay.Message
	for _, m := range messages {
		byLane[m.Lane] = append(byLane[m.Lane], m)
	}
	b.ResetTimer()
	left, inFlight := len(messages), 0
	for turn := 0; left > 0 || inFlight > 0; {
		for left > 0 && inFlight < window {
			lane := &byLane[turn%32]
			turn++
			if n := min(len(*lane), window-inFlight, 100); n > 0 {
				deadline, cancel := context.WithTimeout(ctx, 30*time.Second)
				defer cancel()
				sink.Publish(deadline, (*lane)[:n], done)
				*lane = (*lane)[n:]
				left, inFlight = left-n, inFlight+n
			}
		}
		<-wake
		mu.Lock()
		inFlight -= outcomes
		outcomes = 0
		mu.Unlock()
	}
	b.StopTimer()
	if failure != nil {
		b.Fatal(failure)
	}
}
