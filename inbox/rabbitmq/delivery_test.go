package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestNew_ReportsEveryBadValueOfBothConfigurations(t *testing.T) {
	t.Parallel()
	_, err := rabbitmq.New(wamqp.Config{
		Connection: wamqp.ConnectionConfig{AmqpURI: "amqp://user:secret@example.com/"},
		Consume:    wamqp.ConsumeConfig{Qos: wamqp.QosConfig{PrefetchCount: -1, PrefetchSize: 1, Global: true}},
	}, rabbitmq.Config{Addresses: []string{"amqp://user:secret@other.example/"}, NackDelay: -1, NackDelayMax: -1, AckTimeout: 1, CloseTimeout: -1, DialTimeout: -1, CallTimeout: -1})
	text := fmt.Sprint(err)
	for _, field := range []string{
		"Marshaler", "Exchange.GenerateName", "Queue.GenerateName", "QueueBind.GenerateRoutingKey", "TopologyBuilder",
		"PrefetchCount", "PrefetchSize", "Global", "AmqpURI", "Addresses[0]", "NackDelay ", "NackDelayMax", "AckTimeout", "CloseTimeout", "DialTimeout", "CallTimeout",
	} {
		if !strings.Contains(text, field) {
			t.Errorf("%s is not named", field)
		}
	}
	var bad *oncemill.ConfigError
	if !errors.As(err, &bad) || strings.Contains(text, "secret") {
		t.Errorf("got %v", err)
	}
	if _, err := rabbitmq.New(wamqp.NewDurableQueueConfig("amqp://localhost/"), rabbitmq.Config{}); err != nil {
		t.Error(err)
	}
}

func TestQueue_NeedsAName(t *testing.T) {
	t.Parallel()
	_, err := rabbitmq.Queue("", "", rabbitmq.Config{})(&inbox.Inbox{})
	for _, field := range []string{"Queue consumer", "AmqpURI"} {
		if !strings.Contains(fmt.Sprint(err), field) {
			t.Errorf("%s is not named: %v", field, err)
		}
	}
}

func TestSubscriber_HandsOutAsManyAsThePrefetch(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, queues(uri, 5), rabbitmq.Config{}), "orders")
	for i := range 10 {
		a.publish("orders", publishing(fmt.Sprint(i), ""))
	}
	var held []*message.Message
	for range 5 {
		held = append(held, next(t, out))
	}
	none(t, out)
	// Acknowledged out of order, each makes place for one.
	for _, i := range []int{3, 0, 4} {
		held[i].Ack()
		held = append(held, next(t, out))
	}
	none(t, out)
	for i, want := range []int{0, 1, 2, 3, 4, 5, 6, 7} {
		if held[i].UUID != fmt.Sprint(want) {
			t.Errorf("message %d is %q", i, held[i].UUID)
		}
	}
}

func TestSubscriber_HandsOutAKeyInOrderAndOneAtATime(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, queues(uri, 20), rabbitmq.Config{NackDelay: time.Millisecond}), "orders")
	a.publish("orders", publishing("a1", "a"), publishing("a2", "a"), publishing("b1", "b"), publishing("a3", "a"),
		publishing("free", ""), publishing("free", ""), publishing("b2", "b"))
	expect := func(want string) *message.Message {
		t.Helper()
		msg := next(t, out)
		if msg.UUID != want {
			t.Fatalf("got %q, want %q", msg.UUID, want)
		}
		return msg
	}
	a1, b1, free := expect("a1"), expect("b1"), expect("free") // the copy of free waits like a key
	none(t, out)
	b1.Ack()
	b2 := expect("b2")
	a1.Nack()
	a1 = expect("a1") // before a2, though it was nacked
	free.Ack()
	free = expect("free")
	a1.Ack()
	a2 := expect("a2")
	none(t, out)
	a2.Ack()
	for _, msg := range []*message.Message{expect("a3"), b2, free} {
		msg.Ack()
	}
	none(t, out)
}

func TestSubscriber_DelaysARedeliveryAndHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	out := subscribe(t, subscriber(t, queues(uri, 2), rabbitmq.Config{NackDelay: time.Millisecond}), "orders")
	a.publish("orders", publishing("late", ""))
	for i := range 20 {
		a.publish("orders", publishing(fmt.Sprint(i), ""))
	}
	late := next(t, out)
	d, ok := inbox.DeliveryFromContext(late.Context())
	if !ok || d.Redelivered() {
		t.Fatalf("delivery %v", d)
	}
	const delay = time.Second
	d.DelayNack(delay)
	late.Payload[0] = 'x' // comes again as it was
	nacked := time.Now()
	late.Nack()
	var overtook int // a busy machine may take longer than the delay for all of them
	late = nil
	for overtook < 20 || late == nil {
		msg := next(t, out)
		switch {
		case msg.UUID == fmt.Sprint(overtook):
			overtook++
			msg.Ack()
		case msg.UUID == "late" && late == nil && overtook > 0:
			if since := time.Since(nacked); since < delay {
				t.Errorf("it came after %v", since)
			}
			late = msg
		default:
			t.Fatalf("%q came after %d others", msg.UUID, overtook)
		}
	}
	if string(late.Payload) != "late" {
		t.Errorf("the payload is %q", late.Payload)
	}
	late.Ack()
}

// A graceful stop: what was acknowledged is gone, what was not is in the queue,
// and handlers that run may finish, their contexts alive.
func TestSubscriber_CloseLosesNothingAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	for name, end := range map[string]func(*rabbitmq.Subscriber, context.CancelFunc){
		"close":   func(s *rabbitmq.Subscriber, _ context.CancelFunc) { go s.Close() },
		"context": func(_ *rabbitmq.Subscriber, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			queue := "orders-" + name
			s := subscriber(t, queues(uri, 10), rabbitmq.Config{CloseTimeout: maxWait})
			ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
			defer cancel()
			out, err := s.Subscribe(ctx, queue)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 20 {
				a.publish(queue, publishing(fmt.Sprint(i), ""))
			}
			var held []*message.Message
			for range 10 {
				held = append(held, next(t, out))
			}
			for _, i := range []int{0, 1, 5} {
				held[i].Ack()
			}
			held[2].Nack()
			end(s, cancel)
			for range out { // ends without another message, or with those that were on their way
			}
			if err := held[7].Context().Err(); err != nil {
				t.Errorf("the context of a running handler: %v", err)
			}
			closed := make(chan error, 1)
			go func() { closed <- s.Close() }() // also while another call waits
			testserver.Pause(t.Context(), 50*time.Millisecond)
			if len(closed) > 0 {
				t.Error("Close does not wait for running handlers")
			}
			for _, i := range []int{3, 4, 6, 7, 8, 9} {
				if i != 8 {
					held[i].Ack()
				}
			}
			held[8].Nack()
			if err := <-closed; err != nil {
				t.Error(err)
			}
			n, redelivered := a.left(queue)
			_, nacked := redelivered["2"]
			_, late := redelivered["8"]
			if n != 12 || !nacked || !late {
				t.Errorf("%d messages are left: %v", n, redelivered)
			}
		})
	}
}

func TestSubscriber_CloseWaitsForHandlersNoLongerThanAllowed(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	s := subscriber(t, queues(uri, 10), rabbitmq.Config{CloseTimeout: 50 * time.Millisecond})
	out := subscribe(t, s, "orders")
	a.publish("orders", publishing("slow", ""))
	msg := next(t, out)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if msg.Context().Err() == nil {
		t.Error("the context has not ended")
	}
	msg.Ack() // too late
	if n, redelivered := a.left("orders"); n != 1 || !redelivered["slow"] {
		t.Errorf("%d left, %v", n, redelivered)
	}
	if _, err := s.Subscribe(t.Context(), "orders"); !errors.Is(err, rabbitmq.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := s.SubscribeInitialize("orders"); !errors.Is(err, rabbitmq.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

// stubborn reads nothing that is poison.
type stubborn struct{ wamqp.DefaultMarshaler }

func (m stubborn) Unmarshal(d amqp091.Delivery) (*message.Message, error) {
	switch string(d.Body) {
	case "poison":
		return nil, errors.New("not edible")
	case "venom":
		panic("deadly")
	case "air":
		return nil, nil
	}
	return m.DefaultMarshaler.Unmarshal(d)
}

func TestSubscriber_HandsMalformedDeliveriesToTheHook(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	cfg := queues(uri, 2)
	cfg.Marshaler = stubborn{}
	type refused struct {
		msg    *message.Message
		reason error
	}
	hooked := make(chan refused, 10)
	calls := 0
	s := subscriber(t, cfg, rabbitmq.Config{
		NackDelay: time.Millisecond,
		Key: func(msg *message.Message) string {
			if string(msg.Payload) == "pepper" {
				panic("hot")
			}
			return ""
		},
		Malformed: func(_ context.Context, msg *message.Message, reason error) error {
			if calls++; calls == 1 {
				return errors.New("not now")
			} else if calls == 2 {
				panic("not here")
			}
			hooked <- refused{msg, reason}
			return nil
		},
	})
	out := subscribe(t, s, "orders")
	for _, body := range []string{"poison", "venom", "air", "pepper"} {
		a.publish("orders", amqp091.Publishing{MessageId: "bad", Headers: amqp091.Table{"n": int32(7)}, Body: []byte(body)})
		got := <-hooked
		if string(got.msg.Payload) != body || got.msg.UUID != "bad" || got.msg.Metadata.Get("n") != "7" || got.reason == nil {
			t.Errorf("%s: %+v", body, got)
		}
	}
	a.publish("orders", publishing("good", ""))
	next(t, out).Ack()
	if calls != 6 {
		t.Errorf("the hook was called %d times", calls)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n, _ := a.left("orders"); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

func TestSubscriber_HandsEachOfSeveralMalformedDeliveriesOver(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	a.declare("orders", nil)
	const n = 50
	var all []amqp091.Publishing
	for i := range n {
		all = append(all, amqp091.Publishing{MessageId: fmt.Sprint(i), Body: []byte("poison")})
	}
	a.publish("orders", all...)
	cfg := queues(uri, 20)
	cfg.Marshaler = stubborn{}
	hooked := make(chan string, 2*n)
	s := subscriber(t, cfg, rabbitmq.Config{Malformed: func(_ context.Context, msg *message.Message, _ error) error {
		hooked <- msg.UUID
		return nil
	}})
	subscribe(t, s, "orders")
	seen := map[string]bool{}
	for range n {
		select {
		case id := <-hooked:
			seen[id] = true
		case <-time.After(maxWait):
			t.Fatalf("only %d were handed over", len(seen))
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := a.left("orders"); len(seen) != n || len(hooked) != 0 || left != 0 {
		t.Errorf("%d of %d, %d twice, %d left", len(seen), n, len(hooked), left)
	}
}

func TestSubscriber_WithoutAHookKeepsMalformedDeliveriesInTheirQueue(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	cfg := queues(uri, 2)
	cfg.Marshaler = stubborn{}
	s := subscriber(t, cfg, rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	a.publish("orders", amqp091.Publishing{Body: []byte("poison")}, publishing("good", ""))
	next(t, out).Ack()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n, _ := a.left("orders"); n != 1 {
		t.Errorf("%d messages are left", n)
	}
}

func TestSubscriber_NoRequeueOnNackRejects(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	a.declare("dead", nil)
	cfg := queues(uri, 2)
	cfg.Consume.NoRequeueOnNack = true
	cfg.Queue.Arguments = amqp091.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
	s := subscriber(t, cfg, rabbitmq.Config{})
	out := subscribe(t, s, "orders")
	for i := range 5 {
		a.publish("orders", publishing(fmt.Sprint(i), ""))
	}
	for i := range 5 {
		if msg := next(t, out); i%2 == 0 {
			msg.Nack()
		} else {
			msg.Ack()
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	dead, _ := a.left("dead")
	if left, _ := a.left("orders"); dead != 3 || left != 0 {
		t.Errorf("%d dead, %d left", dead, left)
	}
}

// A quorum queue counts its deliveries; the count is metadata.
func TestSubscriber_ConsumesQuorumQueuesAndReadsTheirCount(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	a := newAdmin(t, uri)
	cfg := queues(uri, 2)
	cfg.Queue.Arguments = amqp091.Table{"x-queue-type": "quorum"}
	for delivery := range 3 {
		s := subscriber(t, cfg, rabbitmq.Config{CloseTimeout: time.Millisecond})
		out := subscribe(t, s, "orders")
		if delivery == 0 {
			a.publish("orders", publishing("a", ""))
		}
		msg := next(t, out)
		want := ""
		if delivery > 0 {
			want = fmt.Sprint(delivery)
		}
		d, _ := inbox.DeliveryFromContext(msg.Context())
		if got := msg.Metadata.Get("x-delivery-count"); got != want || d.Redelivered() != (delivery > 0) {
			t.Errorf("delivery %d: count %q, redelivered %t", delivery, got, d.Redelivered())
		}
		if delivery == 2 {
			msg.Ack()
		}
		if err := s.Close(); err != nil { // a crash, as far as the queue can tell
			t.Error(err)
		}
	}
	eventually(t, "the queue is empty", func() bool { n, _ := a.left("orders"); return n == 0 })
}
