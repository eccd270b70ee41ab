package rabbitmq_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
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

func TestSink_DeliversEveryLaneInOrder(t *testing.T) {
	t.Parallel()
	lanes, perLane := 32, testserver.Rounds(150, 400)
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	sink := start(t, queues(uri), rabbitmq.Config{Window: 50})

	o := newOutcomes(t)
	var group sync.WaitGroup
	for lane := range lanes {
		group.Go(func() {
			msgs := batch(lane, 1, perLane, "orders")
			for size := 1; len(msgs) > 0; size = size*2%77 + 1 {
				n := min(size, len(msgs))
				sink.Publish(t.Context(), msgs[:n], o.done)
				msgs = msgs[n:]
			}
		})
	}
	group.Wait()
	o.await(lanes * perLane)
	if delivered, refused, unavailable := o.kinds(); delivered != lanes*perLane {
		t.Fatalf("delivered %d, refused %d, unavailable %d", delivered, refused, unavailable)
	}
	latest := map[int]int{}
	arrived := content(t, admin, "orders")
	for _, d := range arrived {
		var lane, id int
		if _, err := fmt.Sscanf(d.MessageId, "%d-%d", &lane, &id); err != nil {
			t.Fatal(err)
		}
		if id != latest[lane]+1 {
			t.Fatalf("lane %d: %d follows %d", lane, id, latest[lane])
		}
		latest[lane] = id
	}
	if len(arrived) != lanes*perLane {
		t.Errorf("%d messages arrived", len(arrived))
	}
}

func TestSink_WritesPropertiesAndStringHeaders(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	sink := start(t, queues(uri), rabbitmq.Config{})

	created := time.Date(2026, 11, 21, 10, 11, 12, 345_678_000, time.UTC)
	keyed := &relay.Message{
		Lane: 7, ID: 4711, Topic: "orders", MessageID: "the-id", Key: "customer-1", CreatedAt: created,
		Payload:  []byte{0, 255, 10, 13},
		Metadata: message.Metadata{"colour": "blue", "oncemill_id": "forged", "oncemill-created-at": "forged", "_watermill_message_uuid": "forged"},
	}
	bare := &relay.Message{Lane: 7, ID: 4712, Topic: "orders", MessageID: "other-id", CreatedAt: created}
	deliver(t, sink, []*relay.Message{keyed, bare})

	arrived := content(t, admin, "orders")
	if len(arrived) != 2 {
		t.Fatalf("%d messages arrived", len(arrived))
	}
	d := arrived[0]
	if d.MessageId != "the-id" || d.Type != "orders" || !d.Timestamp.Equal(created.Truncate(time.Second)) ||
		d.DeliveryMode != amqp.Persistent || string(d.Body) != string(keyed.Payload) {
		t.Errorf("got %+v", d)
	}
	for i, want := range []amqp.Table{
		{"_watermill_message_uuid": "the-id", "colour": "blue", "oncemill_id": "7/4711", "oncemill_key": "customer-1", "oncemill-created-at": "2026-11-21T10:11:12.345678Z"},
		{"_watermill_message_uuid": "other-id", "oncemill_id": "7/4712", "oncemill-created-at": "2026-11-21T10:11:12.345678Z"},
	} {
		if !maps.Equal(arrived[i].Headers, want) {
			t.Errorf("headers %v, want %v", arrived[i].Headers, want)
		}
	}
	if keyed.Metadata["oncemill_id"] != "forged" {
		t.Error("the sink changed the message")
	}
}

func TestSink_IsReadByStockSubscriber(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	for name, marshaler := range map[string]wamqp.Marshaler{
		"default": wamqp.DefaultMarshaler{},
		"postprocessed": wamqp.DefaultMarshaler{PostprocessPublishing: func(p amqp.Publishing) amqp.Publishing {
			p.ContentType = "application/json"
			return p
		}},
		"other header": wamqp.DefaultMarshaler{MessageUUIDHeaderKey: "uuid"},
		"correlating":  wamqp.CorrelatingMarshaler{},
	} {
		t.Run(name, func(t *testing.T) {
			topic := "orders " + name
			cfg := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix("stock"))
			cfg.Marshaler = marshaler
			subscriber, err := wamqp.NewSubscriber(cfg, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = subscriber.Close() })
			received, err := subscriber.Subscribe(t.Context(), topic)
			if err != nil {
				t.Fatal(err)
			}
			sink := start(t, cfg, rabbitmq.Config{})
			sent := batch(3, 1, 20, topic)
			deliver(t, sink, sent)
			for _, want := range sent {
				select {
				case got := <-received:
					if got.UUID != want.MessageID || string(got.Payload) != string(want.Payload) ||
						got.Metadata["number"] != want.Metadata["number"] || got.Metadata["oncemill_key"] != want.Key {
						t.Errorf("got %v %q %v, want %v", got.UUID, got.Payload, got.Metadata, want)
					}
					got.Ack()
				case <-time.After(maxWait):
					t.Fatal("the subscriber gets nothing")
				}
			}
		})
	}
}

func TestSink_SendsAnyBytes(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "\x00ü", nil)
	sink := start(t, queues(uri), rabbitmq.Config{})
	sent := &relay.Message{
		ID: 1, Topic: "\x00ü", MessageID: "\x00ü", Key: "\x00\xff", Payload: make([]byte, 300_000),
		Metadata: message.Metadata{"": "", "\x00ü": "\xff", "long": string(make([]byte, 100_000))},
	}
	deliver(t, sink, []*relay.Message{sent})
	arrived := content(t, admin, sent.Topic)
	if len(arrived) != 1 {
		t.Fatalf("%d messages arrived", len(arrived))
	}
	d := arrived[0]
	if d.MessageId != sent.MessageID || d.Headers["oncemill_key"] != sent.Key || !bytes.Equal(d.Body, sent.Payload) {
		t.Error("the message changed on its way")
	}
	for k, v := range sent.Metadata {
		if d.Headers[k] != v {
			t.Errorf("header %q has %.10q", k, d.Headers[k])
		}
	}
}

func TestSink_CopiesHeadersOfForeignMarshalers(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	shared := amqp.Table{"tenant": "one"}
	cfg := queues(uri)
	cfg.Marshaler = wamqp.DefaultMarshaler{
		NotPersistentDeliveryMode: true,
		PostprocessPublishing: func(p amqp.Publishing) amqp.Publishing {
			p.Headers = shared
			return p
		},
	}
	sink := start(t, cfg, rabbitmq.Config{})
	var group sync.WaitGroup
	for lane := range 4 {
		group.Go(func() { deliver(t, sink, batch(lane, 1, 50, "orders")) })
	}
	group.Wait()
	if len(shared) != 1 {
		t.Errorf("the marshaler's table became %v", shared)
	}
	for _, d := range content(t, admin, "orders") {
		if d.DeliveryMode != amqp.Persistent {
			t.Fatal("not persistent")
		}
	}
}

func TestSink_AnswersWhatIsPublishedFromDone(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	sink := start(t, queues(uri), rabbitmq.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	o := newOutcomes(t)
	msgs := batch(0, 1, 100, "orders")
	var next func(*relay.Message, error)
	next = func(m *relay.Message, err error) {
		o.done(m, err)
		if int(m.ID) < len(msgs) {
			sink.Publish(ctx, msgs[m.ID:m.ID+1], next)
		}
	}
	sink.Publish(ctx, msgs[:1], next)
	o.await(len(msgs))
	if delivered, _, _ := o.kinds(); delivered != len(msgs) {
		t.Errorf("%d delivered", delivered)
	}
}
