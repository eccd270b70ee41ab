package rabbitmq_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestSink_CallsANackUnavailable(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "full", amqp.Table{"x-max-length": 10, "x-overflow": "reject-publish"})
	sink := start(t, queues(uri), rabbitmq.Config{})
	msgs := batch(0, 1, 200, "full")
	o := publish(t, sink, maxWait, msgs)
	delivered, refused, unavailable := o.kinds()
	if refused > 0 || unavailable == 0 || delivered < 10 {
		t.Errorf("delivered %d, refused %d, unavailable %d", delivered, refused, unavailable)
	}
	for _, m := range msgs {
		if err := o.of(m); err != nil && !errors.Is(err, rabbitmq.ErrNacked) {
			t.Fatalf("message %d: %v", m.ID, err)
		}
	}
	if !sink.Ready() {
		t.Error("a nack cost the connection")
	}
	if arrived := len(content(t, admin, "full")); arrived != delivered {
		t.Errorf("%d delivered, %d arrived", delivered, arrived)
	}
}

// One node for what needs a node of its own, one after the other.
func TestSink_SurvivesOutages(t *testing.T) {
	t.Parallel()
	node := testserver.PrivateRabbitMQ(t, "max_message_size="+fmt.Sprint(mostBytes))
	other, otherURI := testserver.ProxyAMQP(t, node.URI())
	sink := start(t, queues(node.URI()), rabbitmq.Config{Addresses: []string{otherURI}})
	id := 0
	next := func(n int) []*relay.Message {
		id += n
		return batch(id%32, id, n, "orders")
	}
	t.Run("setup", func(t *testing.T) { declareQueue(t, dialAMQP(t, node.URI()), "orders", nil) })
	t.Run("messages that are too large", func(t *testing.T) { findsWhatIsTooLarge(t, sink, next(300)) })

	alarms := map[string]struct{ raise, clear func() }{"memory alarm": {node.RaiseMemoryAlarm, node.ClearMemoryAlarm}}
	if testserver.Long() { // it is the same to publishers
		alarms["disk alarm"] = struct{ raise, clear func() }{node.RaiseDiskAlarm, node.ClearDiskAlarm}
	}
	for name, alarm := range alarms {
		t.Run(name, func(t *testing.T) {
			deliver(t, sink, next(10))
			alarm.raise()
			ended := sync.OnceFunc(alarm.clear)
			defer ended()
			// The broker says that it blocks only when something is published.
			inFlight := publish(t, sink, time.Second, next(10))
			awaitReady(t, sink, false)
			begin := time.Now()
			handedOver := publish(t, sink, 300*time.Millisecond, next(10))
			if took := time.Since(begin); took > 5*time.Second || took < 250*time.Millisecond {
				t.Errorf("outcomes after %v, due after 300 ms", took)
			}
			for _, o := range []*outcomes{inFlight, handedOver} {
				if _, _, unavailable := o.kinds(); unavailable != 10 {
					t.Errorf("%d of 10 unavailable while blocked", unavailable)
				}
			}
			msgs := next(10)
			o := newOutcomes(t)
			sink.Publish(t.Context(), msgs, o.done) // waits for the end of the alarm
			ended()
			o.await(len(msgs))
			if delivered, _, _ := o.kinds(); delivered != len(msgs) {
				t.Errorf("%d delivered after the alarm", delivered)
			}
			awaitReady(t, sink, true)
			if n := other.Dials.Load(); n > 0 {
				t.Errorf("%d connections to the other address: an alarm is no reason to leave", n)
			}
		})
	}

	t.Run("connections closed by the broker", func(t *testing.T) {
		for range testserver.Rounds(1, 3) {
			deliver(t, sink, next(50))
			node.Eval(testserver.CloseConnections)
			deliver(t, sink, next(50))
		}
	})

	t.Run("broker stopped", func(t *testing.T) {
		deliver(t, sink, next(50))
		node.StopApp()
		awaitReady(t, sink, false)
		// Known to be down: nobody has to wait for the deadline.
		eventually(t, "the sink knows", func() bool {
			begin := time.Now()
			_, _, unavailable := publish(t, sink, 5*time.Second, next(5)).kinds()
			return unavailable == 5 && time.Since(begin) < time.Second
		})
		node.StartApp()
		deliver(t, sink, next(50))
	})

	if !testserver.Long() { // a node takes seconds to start
		return
	}
	t.Run("broker killed", func(t *testing.T) {
		deliver(t, sink, next(50))
		node.Kill()
		if _, _, unavailable := publish(t, sink, time.Second, next(5)).kinds(); unavailable != 5 {
			t.Errorf("%d of 5 unavailable", unavailable)
		}
		node.Start()
		deliver(t, sink, next(50))
	})
}

func TestSink_DeclaresAnExchangeThatWasDeleted(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	sink := start(t, fanout(uri), rabbitmq.Config{})
	bind := func() {
		declareQueue(t, admin, "orders_q", nil)
		if err := admin.ExchangeDeclare("orders", "fanout", true, false, false, false, nil); err != nil {
			t.Fatal(err)
		}
		if err := admin.QueueBind("orders_q", "", "orders", false, nil); err != nil {
			t.Fatal(err)
		}
	}
	bind()
	deliver(t, sink, batch(0, 1, 10, "orders"))
	if err := admin.ExchangeDelete("orders", false, false); err != nil {
		t.Fatal(err)
	}
	// In flight, a missing exchange is unavailable. Then the sink declares it,
	// which makes what is published unroutable until the queue is bound.
	if _, _, unavailable := publish(t, sink, maxWait, batch(0, 11, 10, "orders")).kinds(); unavailable != 10 {
		t.Errorf("%d of 10 unavailable without the exchange", unavailable)
	}
	if _, refused, _ := publish(t, sink, maxWait, batch(0, 11, 10, "orders")).kinds(); refused != 10 {
		t.Errorf("%d of 10 refused without the binding", refused)
	}
	bind()
	deliver(t, sink, batch(0, 11, 10, "orders"))
}

// A topic whose exchange does not exist, and is not declared, must not keep the
// others of its lane from being delivered.
func TestSink_DeliversBesideATopicWithoutExchange(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "q", nil)
	if err := admin.ExchangeDeclare("good", "fanout", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := admin.QueueBind("q", "", "good", false, nil); err != nil {
		t.Fatal(err)
	}
	cfg := fanout(uri)
	cfg.TopologyBuilder = declaresNothing{}
	sink := start(t, cfg, rabbitmq.Config{})
	msgs := batch(0, 1, 200, "good")
	for i, m := range msgs {
		if i%4 == 0 {
			m.Topic = "missing"
		}
	}
	open := msgs
	for round := 1; len(open) > 50; round++ {
		if round > 3 {
			t.Fatalf("%d of 150 messages with an exchange are open", len(open)-50)
		}
		o := publish(t, sink, 10*time.Second, open)
		var left []*relay.Message
		for _, m := range open {
			switch err := o.of(m); {
			case err == nil && m.Topic == "good":
			case errors.Is(err, relay.ErrUnavailable):
				left = append(left, m)
			default:
				t.Fatalf("message to %q: %v", m.Topic, err)
			}
		}
		open = left
	}
	if err := admin.ExchangeDeclare("missing", "fanout", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := admin.QueueBind("q", "", "missing", false, nil); err != nil {
		t.Fatal(err)
	}
	deliver(t, sink, open)
}

func TestSink_ReportsADeclarationThatFails(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	if err := dialAMQP(t, uri).ExchangeDeclare("orders", "direct", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	sink := start(t, fanout(uri), rabbitmq.Config{})
	msgs := append(batch(0, 1, 2, "orders"), batch(0, 3, 2, "others")...)
	o := publish(t, sink, maxWait, msgs)
	var closed *amqp.Error
	if err := o.of(msgs[0]); !errors.Is(err, relay.ErrUnavailable) || !errors.As(err, &closed) || closed.Code != amqp.PreconditionFailed {
		t.Errorf("exchange of another type: %v", err)
	}
	if err := o.of(msgs[3]); !errors.Is(err, relay.ErrRefused) {
		t.Errorf("other topic, without a queue: %v", err)
	}
}

func TestSink_ReplacesAChannelWhoseConfirmsAreLost(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	sink := start(t, queues(proxied), rabbitmq.Config{Window: 4, ConfirmTimeout: 500 * time.Millisecond})
	deliver(t, sink, batch(0, 1, 10, "orders"))
	p.DropAcks.Store(true)
	if _, _, unavailable := publish(t, sink, 100*time.Millisecond, batch(0, 11, 10, "orders")).kinds(); unavailable != 10 {
		t.Errorf("%d of 10 unavailable without confirms", unavailable)
	}
	p.DropAcks.Store(false)
	deliver(t, sink, batch(0, 11, 10, "orders"))
	if n := p.Dials.Load(); n != 1 {
		t.Errorf("%d connections, the first one would have done", n)
	}
}

func TestSink_BelievesNothingAfterAStrayReturn(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	sink := start(t, queues(proxied), rabbitmq.Config{})
	p.Mangle.Store(true)
	msgs := append(batch(0, 1, 10, "nowhere"), batch(0, 11, 10, "orders")...)
	o := publish(t, sink, maxWait, msgs)
	for _, m := range msgs {
		if err := o.of(m); !errors.Is(err, rabbitmq.ErrStrayReturn) || !errors.Is(err, relay.ErrUnavailable) {
			t.Errorf("message to %q: %v", m.Topic, err)
		}
	}
	p.Mangle.Store(false)
	if err := publish(t, sink, maxWait, msgs[:1]).of(msgs[0]); !errors.Is(err, relay.ErrRefused) {
		t.Errorf("on the next channel: %v", err)
	}
	deliver(t, sink, msgs[10:])
}

func TestSink_DropsAConnectionThatAnswersNothing(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	p, proxied := testserver.ProxyAMQP(t, uri)
	sink := start(t, queues(proxied), rabbitmq.Config{CallTimeout: 300 * time.Millisecond, ConfirmTimeout: 300 * time.Millisecond, DialTimeout: 300 * time.Millisecond})
	deliver(t, sink, batch(0, 1, 10, "orders"))
	p.Frozen.Store(true)
	for lane := range 2 { // on an open channel, and on one to be opened
		if _, _, unavailable := publish(t, sink, 100*time.Millisecond, batch(lane, 11, 10, "orders")).kinds(); unavailable != 10 {
			t.Errorf("%d of 10 unavailable", unavailable)
		}
	}
	eventually(t, "another connection", func() bool { return p.Dials.Load() > 2 })
	p.Frozen.Store(false)
	deliver(t, sink, batch(0, 11, 10, "orders"))
}

// A broker that is silent to a new connection keeps no message: another worker may reach it, and has
// the lanes once they have their outcomes.
func TestSink_KeepsNothingWhileItConnects(t *testing.T) {
	t.Parallel()
	sink, p, _ := proxied(t, 1, rabbitmq.Config{ConfirmTimeout: 3 * time.Second, DialTimeout: time.Hour})
	p.Frozen.Store(true)
	p.Cut()
	awaitReady(t, sink, false)
	msgs := batch(0, 10, 3, "orders")
	o := newOutcomes(t)
	sink.Publish(t.Context(), msgs, o.done)
	o.await(len(msgs))
	for _, m := range msgs {
		if err := o.of(m); !errors.Is(err, relay.ErrUnavailable) || !errors.Is(err, rabbitmq.ErrNoConnection) {
			t.Errorf("outcome %v", err)
		}
	}
	p.Frozen.Store(false)
	p.Cut() // frames are missing
	deliver(t, sink, msgs)
}
