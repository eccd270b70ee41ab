package rabbitmq_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

func TestSink_RefusesUnroutableUntilTheQueueIsBack(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	sink := start(t, queues(uri), rabbitmq.Config{})
	msgs := batch(5, 1, 1000, "gone")

	o := publish(t, sink, maxWait, msgs)
	for _, m := range msgs {
		var unroutable *rabbitmq.ReturnedError
		if err := o.of(m); !errors.Is(err, relay.ErrRefused) || !errors.As(err, &unroutable) ||
			unroutable.RoutingKey != "gone" || unroutable.Code != amqp091.NoRoute {
			t.Fatalf("message %d: %v", m.ID, err)
		}
		if text := unroutable.Error(); !strings.Contains(text, `for routing key "gone": start its consumer, or bind a queue (312`) {
			t.Errorf("it says %s", text)
		}
	}
	declareQueue(t, admin, "gone", nil)
	deliver(t, sink, msgs)
	arrived := content(t, admin, "gone")
	if len(arrived) != len(msgs) {
		t.Fatalf("%d arrived", len(arrived))
	}
	for i, d := range arrived {
		if d.MessageId != msgs[i].MessageID {
			t.Fatalf("place %d has %s", i, d.MessageId)
		}
	}
}

func TestSink_TellsMessagesWithOneMessageIDApart(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "here", nil)
	sink := start(t, queues(uri), rabbitmq.Config{})
	for round := range 50 {
		msgs := append(batch(1, 10*round, 1, "here"), batch(1, 10*round+1, 1, "nowhere")...)
		if round%2 == 1 {
			msgs[0], msgs[1] = msgs[1], msgs[0]
		}
		for _, m := range msgs {
			m.MessageID = "same"
		}
		o := publish(t, sink, maxWait, msgs)
		for _, m := range msgs {
			if err := o.of(m); (err == nil) != (m.Topic == "here") {
				t.Fatalf("message to %q: %v", m.Topic, err)
			}
		}
	}
}

// The window is as small as it can be, so that one return too many in flight
// would be dropped and its message pass for delivered.
func TestSink_KeepsEveryReturn(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "here", nil)
	for _, window := range []int{1, 2, 64} {
		t.Run(fmt.Sprint(window), func(t *testing.T) {
			sink := start(t, queues(uri), rabbitmq.Config{Window: window})
			msgs := batch(0, 1, 600, "nowhere")
			for i, m := range msgs {
				if i%5 == 0 {
					m.Topic = "here"
				}
			}
			o := publish(t, sink, maxWait, msgs)
			for _, m := range msgs {
				if err := o.of(m); (err == nil) != (m.Topic == "here") {
					t.Fatalf("message %d to %q: %v", m.ID, m.Topic, err)
				}
			}
		})
	}
}

type failingMarshaler struct{ amqp.DefaultMarshaler }

func (f failingMarshaler) Marshal(m *message.Message) (amqp091.Publishing, error) {
	switch m.UUID {
	case "unmarshalable":
		return amqp091.Publishing{}, errors.New("no such form")
	case "frightening":
		panic("no such thing")
	case "ending":
		runtime.Goexit()
	case "bad type":
		return amqp091.Publishing{Headers: amqp091.Table{"x": struct{}{}}}, nil
	case "deep":
		return amqp091.Publishing{Headers: amqp091.Table{"x": []any{amqp091.Table{strings.Repeat("k", 256): 1}}}}, nil
	case "user":
		return amqp091.Publishing{UserId: "somebody else"}, nil
	}
	return f.DefaultMarshaler.Marshal(m)
}

func TestSink_RefusesTheBadMessageAndSendsItsNeighbours(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	long := strings.Repeat("x", 256)
	tests := map[string]func(m *relay.Message){
		"message id":                           func(m *relay.Message) { m.MessageID = long },
		"topic":                                func(m *relay.Message) { m.Topic = long },
		"no UTF-8 id":                          func(m *relay.Message) { m.MessageID = "\xff" },
		"no UTF-8 name":                        func(m *relay.Message) { m.Metadata = message.Metadata{"\xff": "v"} },
		"no UTF-8 key":                         func(m *relay.Message) { m.Topic = "no UTF-8" },
		"header name":                          func(m *relay.Message) { m.Metadata = message.Metadata{long: "v"} },
		"header size":                          func(m *relay.Message) { m.Metadata = message.Metadata{"big": strings.Repeat("v", 1<<17)} },
		"exchange":                             func(m *relay.Message) { m.Topic = "long exchange" },
		"routing key":                          func(m *relay.Message) { m.Topic = "long key" },
		"CC header":                            func(m *relay.Message) { m.Metadata = message.Metadata{"CC": "not a list"} },
		"marshal error":                        func(m *relay.Message) { m.MessageID = "unmarshalable" },
		"marshaler":                            func(m *relay.Message) { m.MessageID = "frightening" },
		"key function":                         func(m *relay.Message) { m.Topic = "frightening" },
		"marshaler that ends its goroutine":    func(m *relay.Message) { m.MessageID = "ending" },
		"key function that ends its goroutine": func(m *relay.Message) { m.Topic = "ending" },

		"header type": func(m *relay.Message) { m.MessageID = "bad type" },
		"nested name": func(m *relay.Message) { m.MessageID = "deep" },
		// This one only the broker refuses, by closing the channel.
		"property": func(m *relay.Message) { m.MessageID = "user" },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := queues(uri)
			cfg.Marshaler = failingMarshaler{}
			cfg.Exchange.GenerateName = func(topic string) string {
				if topic == "long exchange" {
					return long
				}
				return ""
			}
			cfg.Publish.GenerateRoutingKey = func(topic string) string {
				switch topic {
				case "frightening":
					panic("no such key")
				case "ending":
					runtime.Goexit()
				case "long key":
					return long
				case "no UTF-8":
					return "\xff"
				}
				return topic
			}
			sink := start(t, cfg, rabbitmq.Config{})
			msgs := batch(2, 1, 21, "orders")
			bad := msgs[10]
			spoil(bad)
			open := msgs
			for round := 1; len(open) > 0; round++ {
				if round > 3 {
					t.Fatalf("%d messages without a final outcome", len(open))
				}
				o := publish(t, sink, 5*time.Second, open)
				var left []*relay.Message
				for _, m := range open {
					err := o.of(m)
					if errors.Is(err, relay.ErrUnavailable) {
						left = append(left, m)
					} else if (err == nil) == (m == bad) {
						t.Fatalf("message %d: %v", m.ID, err)
					}
				}
				open = left
			}
		})
	}
}

// RabbitMQ reads CC and BCC as arrays of routing keys, and closes the channel if they
// are anything else. It takes all other names that mean something to it.
func TestSink_RefusesMetadataThatClosesTheChannel(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	admin := dialAMQP(t, uri)
	declareQueue(t, admin, "orders", nil)
	declareQueue(t, admin, "copies", nil)
	array := amqp.DefaultMarshaler{PostprocessPublishing: func(p amqp091.Publishing) amqp091.Publishing {
		if to, ok := p.Headers["copy-to"]; ok {
			p.Headers["BCC"] = []any{to}
		}
		return p
	}}
	for name, marshaler := range map[string]amqp.Marshaler{"stock": amqp.DefaultMarshaler{}, "foreign": array} {
		t.Run(name, func(t *testing.T) {
			cfg := queues(uri)
			cfg.Marshaler = marshaler
			sink := start(t, cfg, rabbitmq.Config{})
			names := []string{
				"CC", "BCC", "cc", "bcc", "x-death", "x-delay", "x-match", "x-received-from", "x-first-death-reason", "x-stream-filter-value",
				"x-deduplication-header", "x-priority", "x-message-ttl", "alternate-exchange", "expiration", "timestamp", "user-id",
			}
			msgs := batch(0, 1, len(names), "orders")
			for i, header := range names {
				msgs[i].Metadata = message.Metadata{header: "other"}
			}
			o := publish(t, sink, maxWait, msgs)
			for i, m := range msgs {
				var bad *rabbitmq.PropertyError
				switch err := o.of(m); {
				case i >= 2 && err != nil:
					t.Errorf("metadata %s: %v", names[i], err)
				case i < 2 && (!errors.Is(err, relay.ErrRefused) || !errors.As(err, &bad)):
					t.Errorf("metadata %s: %v, want a refusal", names[i], err)
				}
			}
			if n := len(content(t, admin, "orders")); n != len(names)-2 {
				t.Errorf("%d messages arrived", n)
			}
		})
	}
	cfg := queues(uri)
	cfg.Marshaler = array
	msgs := batch(0, 1, 1, "orders")
	msgs[0].Metadata = message.Metadata{"copy-to": "copies"}
	deliver(t, start(t, cfg, rabbitmq.Config{}), msgs)
	if a, b := len(content(t, admin, "orders")), len(content(t, admin, "copies")); a != 1 || b != 1 {
		t.Errorf("%d and %d messages, want one in each queue", a, b)
	}
}

// At the edge of what fits, the broker must agree with the sink's arithmetic.
func TestSink_SendsWhatJustFits(t *testing.T) {
	t.Parallel()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, dialAMQP(t, uri), "orders", nil)
	sink := start(t, queues(uri), rabbitmq.Config{})
	delivered, refused := 0, 0
	for size := 130_700; size < 131_072; size += 7 {
		msgs := batch(0, size, 1, "orders")
		msgs[0].Metadata = message.Metadata{"big": strings.Repeat("v", size)}
		o := publish(t, sink, maxWait, msgs)
		switch err := o.of(msgs[0]); {
		case err == nil:
			delivered++
		case errors.Is(err, relay.ErrRefused):
			refused++
		default:
			t.Fatalf("%d bytes: %v", size, err)
		}
	}
	if delivered == 0 || refused == 0 {
		t.Errorf("%d delivered, %d refused: the edge was not crossed", delivered, refused)
	}
}

// mostBytes is the size of a message from which on the broker refuses it, by closing the channel.
const mostBytes = 20_000

// findsWhatIsTooLarge hands over 300 messages of which the broker refuses three.
func findsWhatIsTooLarge(t *testing.T, sink *rabbitmq.Sink, open []*relay.Message) {
	large := map[*relay.Message]bool{open[17]: true, open[18]: true, open[200]: true}
	for m := range large {
		m.Payload = make([]byte, mostBytes+1)
	}
	for round := 1; len(open) > 0; round++ {
		if round > 3 {
			t.Fatalf("%d messages without a final outcome", len(open))
		}
		o := publish(t, sink, 10*time.Second, open)
		var left []*relay.Message
		for _, m := range open {
			var rejected *rabbitmq.RejectedError
			switch err := o.of(m); {
			case errors.Is(err, relay.ErrUnavailable):
				left = append(left, m)
			case (err != nil) != large[m]:
				t.Fatalf("message %d of %d bytes: %v", m.ID, len(m.Payload), err)
			case large[m] && !errors.As(err, &rejected):
				t.Fatalf("large message: %v", err)
			}
		}
		open = left
	}
}
