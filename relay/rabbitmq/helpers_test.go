package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
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

// maxWait is how long a test waits before it fails.
const maxWait = testserver.MaxWait

var quiet = slog.New(slog.DiscardHandler)

// dialAMQP returns a channel of a connection of its own.
func dialAMQP(t testing.TB, uri string) *amqp.Channel {
	t.Helper()
	conn, err := amqp.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

// queues is the configuration of most tests: a topic is the name of a queue.
func queues(uri string) wamqp.Config { return wamqp.NewDurableQueueConfig(uri) }

// fanout is watermill-amqp's configuration for topics that are exchanges.
func fanout(uri string) wamqp.Config { return wamqp.NewDurablePubSubConfig(uri, nil) }

// declaresNothing leaves the topology to the operator.
type declaresNothing struct{ wamqp.DefaultTopologyBuilder }

func (declaresNothing) ExchangeDeclare(*amqp.Channel, string, wamqp.Config) error { return nil }

func (declaresNothing) BuildTopology(*amqp.Channel, string, string, wamqp.Config, watermill.LoggerAdapter) error {
	return nil
}

func declareQueue(t testing.TB, ch *amqp.Channel, name string, args amqp.Table) {
	t.Helper()
	if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		t.Fatal(err)
	}
}

// content empties a queue.
func content(t testing.TB, ch *amqp.Channel, queue string) []amqp.Delivery {
	t.Helper()
	var all []amqp.Delivery
	for {
		d, ok, err := ch.Get(queue, true)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return all
		}
		all = append(all, d)
	}
}

// start runs a sink until the test ends and waits for its connection.
func start(t testing.TB, cfg wamqp.Config, opts rabbitmq.Config) *rabbitmq.Sink {
	t.Helper()
	sink, _ := startStoppable(t, cfg, opts)
	awaitReady(t, sink, true)
	return sink
}

func startStoppable(t testing.TB, cfg wamqp.Config, opts rabbitmq.Config) (sink *rabbitmq.Sink, stop func()) {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = quiet
	}
	sink, err := rabbitmq.New(cfg, opts)
	if err != nil {
		t.Fatal(err)
	}
	stop = testserver.Run(t, sink.Run)
	over, end := context.WithCancel(t.Context())
	end()
	eventually(t, "Run", func() bool {
		o := newOutcomes(t)
		probe := batch(0, 0, 1, "probe")
		sink.Publish(over, probe, o.done)
		o.await(1)
		return !errors.Is(o.of(probe[0]), rabbitmq.ErrNotRunning)
	})
	return sink, stop
}

func awaitReady(t testing.TB, sink *rabbitmq.Sink, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("Ready() == %v", want), func() bool { return sink.Ready() == want })
}

var eventually = testserver.Eventually

// batch makes n messages of a lane with ids from first on.
func batch(lane int, first, n int, topic string) []*relay.Message {
	msgs := make([]*relay.Message, n)
	for i := range msgs {
		id := first + i
		msgs[i] = &relay.Message{
			Lane: lane, ID: int64(id), Topic: topic,
			MessageID: fmt.Sprintf("%d-%d", lane, id),
			Key:       fmt.Sprintf("key-%d", id%7),
			Payload:   fmt.Appendf(nil, "payload %d", id),
			Metadata:  message.Metadata{"number": fmt.Sprint(id)},
			CreatedAt: time.Now(),
		}
	}
	return msgs
}

// outcomes collects what a sink says of messages: that it says it once, but for a
// confirm that comes after an outcome that was unavailable.
type outcomes struct {
	t testing.TB

	mu   sync.Mutex
	all  map[*relay.Message]error
	late int // such confirms
}

func newOutcomes(t testing.TB) *outcomes {
	return &outcomes{t: t, all: make(map[*relay.Message]error)}
}

func (o *outcomes) done(m *relay.Message, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if before, ok := o.all[m]; ok && errors.Is(before, relay.ErrUnavailable) && err == nil {
		o.late++
	} else if ok {
		o.t.Errorf("message %d/%d has two outcomes: %v and %v", m.Lane, m.ID, before, err)
	}
	if err != nil && errors.Is(err, relay.ErrRefused) == errors.Is(err, relay.ErrUnavailable) {
		o.t.Errorf("outcome must be either refused or unavailable: %v", err)
	}
	o.all[m] = err
}

func (o *outcomes) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.all)
}

func (o *outcomes) lateConfirms() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.late
}

func (o *outcomes) await(n int) {
	o.t.Helper()
	testserver.EventuallyMoving(o.t, fmt.Sprint(n, " outcomes"), func() bool { return o.count() >= n }, o.count)
}

func (o *outcomes) of(m *relay.Message) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all[m]
}

// errs returns the outcomes that are errors.
func (o *outcomes) errs() (errs []error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, err := range o.all {
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

func (o *outcomes) failed() bool {
	_, refused, unavailable := o.kinds()
	return refused+unavailable > 0
}

// kinds counts delivered, refused and unavailable messages.
func (o *outcomes) kinds() (delivered, refused, unavailable int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, err := range o.all {
		switch {
		case err == nil:
			delivered++
		case errors.Is(err, relay.ErrRefused):
			refused++
		default:
			unavailable++
		}
	}
	return delivered, refused, unavailable
}

// publish waits for the outcomes of one batch.
func publish(t testing.TB, sink relay.Sink, within time.Duration, msgs []*relay.Message) *outcomes {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	o := newOutcomes(t)
	sink.Publish(ctx, msgs, o.done)
	o.await(len(msgs))
	return o
}

// deliver publishes as a relay would, again and again until all is delivered,
// and fails on a refusal. It returns how often something was unavailable.
func deliver(t testing.TB, sink relay.Sink, msgs []*relay.Message) (unavailable int) {
	t.Helper()
	for since := time.Now(); len(msgs) > 0; {
		if time.Since(since) > maxWait {
			t.Fatalf("%d messages not delivered, and none for long", len(msgs))
		}
		o := publish(t, sink, 5*time.Second, msgs)
		var left []*relay.Message
		for _, m := range msgs {
			switch err := o.of(m); {
			case errors.Is(err, relay.ErrRefused):
				t.Fatalf("message %d/%d: %v", m.Lane, m.ID, err)
			case err != nil:
				left = append(left, m)
				if m.Term > 0 {
					m.Term++ // the sink takes nothing more of one that has failed
				}
			}
		}
		if len(left) < len(msgs) {
			since = time.Now()
		}
		msgs = left
		if len(left) > 0 {
			unavailable++
			testserver.Pause(t.Context(), 20*time.Millisecond)
		}
	}
	return unavailable
}
