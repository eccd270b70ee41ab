package rabbitmq_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/doctor"
	"github.com/oncemill/oncemill/doctor/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// broker is a node of its own, since policies and the management API are those of a node.
type broker struct {
	*testing.T
	*testserver.RabbitServer

	ch *amqp.Channel
}

func newBroker(t *testing.T) *broker {
	t.Helper()
	b := &broker{t, testserver.PrivateRabbitMQ(t), nil}
	conn, err := amqp.Dial(b.URI())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if b.ch, err = conn.Channel(); err != nil {
		t.Fatal(err)
	}
	return b
}

// declare declares a queue for a topic of the pub/sub topology, and binds it.
func (b *broker) declare(name string, durable bool, arguments amqp.Table) {
	b.Helper()
	if err := b.ch.ExchangeDeclare(name, "fanout", true, false, false, false, nil); err != nil {
		b.Fatal(err)
	}
	if _, err := b.ch.QueueDeclare(name, durable, false, false, false, arguments); err != nil {
		b.Fatal(err)
	}
	if err := b.ch.QueueBind(name, "", name, false, nil); err != nil {
		b.Fatal(err)
	}
}

// check makes the checks again if the broker was too busy to answer in their time.
func (b *broker) check(topology wamqp.Config, cfg rabbitmq.Config) (found []doctor.Finding) {
	b.Helper()
	d, err := rabbitmq.New(topology, cfg)
	if err != nil {
		b.Fatal(err)
	}
	testserver.Eventually(b, "answers of the broker", func() bool {
		found, err = d.Check(b.Context())
		return !errors.Is(err, context.DeadlineExceeded)
	})
	if err != nil {
		b.Fatal(err)
	}
	return found
}

func TestDoctor_FindsEachFaultOfABroker(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	quorum := amqp.Table{"x-queue-type": "quorum"}
	with := func(base amqp.Table, pairs ...any) amqp.Table {
		all := amqp.Table{}
		for k, v := range base {
			all[k] = v
		}
		for i := 0; i < len(pairs); i += 2 {
			all[pairs[i].(string)] = pairs[i+1]
		}
		return all
	}
	dlx := []any{"x-dead-letter-exchange", "dead"}
	b.declare("healthy", true, quorum)
	b.declare("healthy-full", true, with(quorum, "x-max-length", 10, "x-overflow", "reject-publish"))
	b.declare("healthy-dead-letters", true, with(quorum, append(dlx, "x-delivery-limit", 3)...))
	b.declare("healthy-classic", true, nil)
	b.declare("limited", true, with(quorum, "x-delivery-limit", 3))
	b.declare("by-policy", true, quorum)
	b.declare("full", true, with(nil, "x-max-length", 10))
	b.declare("full-of-bytes", true, with(nil, "x-max-length-bytes", 10))
	b.declare("short-lived", true, with(nil, "x-message-ttl", 1000))
	b.declare("expiring", true, with(nil, "x-expires", 100_000))
	b.declare("expiring-dead-letters", true, with(nil, append(dlx, "x-expires", 100_000)...))
	b.declare("transient", false, nil)
	if err := b.ch.ExchangeDeclare("unbound", "fanout", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	b.Eval(`rabbit_policy:parse_set(<<"/">>, <<"limit">>, <<"^by-policy$">>, <<"{\"delivery-limit\": 5}">>, 0, <<"queues">>, <<"test">>)`)
	pubsub, queue := wamqp.NewDurablePubSubConfig(b.URI(), nil), wamqp.NewDurableQueueConfig(b.URI())
	for _, c := range []struct {
		topic, check, names string
	}{
		{"healthy", "", ""},
		{"healthy-full", "", ""},
		{"healthy-dead-letters", "", ""},
		{"healthy-classic", "", ""},
		{"limited", "delivery-limit", "after 3 deliveries"},
		{"by-policy", "delivery-limit", "after 5 deliveries"},
		{"full", "overflow", "max-length"},
		{"full-of-bytes", "overflow", "max-length-bytes"},
		{"short-lived", "expiry", "message-ttl"},
		{"expiring", "expiry", "expires"},
		{"expiring-dead-letters", "expiry", "expires"},
		{"transient", "durability", `"transient"`},
		{"unbound", "binding", `"unbound"`},
		{"absent", "exchange", `"absent"`},
	} {
		expect := func(found []doctor.Finding, check string) {
			t.Helper()
			switch {
			case check == "" && len(found) > 0:
				t.Errorf("%s: %+v", c.topic, found)
			case check != "" && (len(found) != 1 || found[0].Check != check || found[0].Severity != doctor.Error || !strings.Contains(found[0].Problem, c.names) || found[0].Remedy == ""):
				t.Errorf("%s: %+v; want %s, %q", c.topic, found, check, c.names)
			}
		}
		var found []doctor.Finding
		// The API shows a policy, or a new queue, a moment later.
		testserver.Eventually(t, c.topic, func() bool {
			found = b.check(pubsub, rabbitmq.Config{Topics: []string{c.topic}, Admin: b.Admin()})
			return (len(found) > 0) == (c.check != "")
		})
		expect(found, c.check)
		if c.check != "binding" && c.check != "exchange" { // there is a queue of that name
			expect(b.check(queue, rabbitmq.Config{Topics: []string{c.topic}, Admin: b.Admin()}), c.check)
			expect(b.check(queue, rabbitmq.Config{Queues: []string{c.topic}, Admin: b.Admin()}), c.check)
			expect(b.check(queue, rabbitmq.Config{Queues: []string{c.topic}}), "") // it exists
		}
	}
	found := b.check(queue, rabbitmq.Config{Topics: []string{"no-queue"}, Queues: []string{"no-other", "healthy"}})
	if len(found) != 2 || found[0].Check != "queue" || !strings.Contains(found[0].Problem, `"no-queue"`) || !strings.Contains(found[1].Problem, `"no-other"`) {
		t.Errorf("%+v", found)
	}

	if _, err := b.ch.QueueDeclare("private", true, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	found = b.check(queue, rabbitmq.Config{Queues: []string{"private"}, Admin: b.Admin()})
	if len(found) != 1 || found[0].Check != "durability" || !strings.Contains(found[0].Problem, "is exclusive") {
		t.Errorf("%+v", found)
	}

	refused, err := rabbitmq.New(queue, rabbitmq.Config{Queues: []string{"healthy"}, Admin: strings.Replace(b.Admin(), "guest:guest", "guest:hunter2", 1)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := refused.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "status 401") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a wrong password: %v", err)
	}
}

func TestPublisher_NeedsConfirmsReturnsAndPersistence(t *testing.T) {
	t.Parallel()
	cfg := wamqp.NewDurablePubSubConfig("amqp://localhost", nil)
	cfg.Publish.ConfirmDelivery, cfg.Publish.Mandatory = true, true
	if found := rabbitmq.Publisher(cfg); len(found) > 0 {
		t.Errorf("%+v", found)
	}
	cfg.Publish.ConfirmDelivery, cfg.Publish.Mandatory = false, false
	cfg.Marshaler = wamqp.DefaultMarshaler{NotPersistentDeliveryMode: true}
	found := rabbitmq.Publisher(cfg)
	if len(found) != 3 || found[0].Check != "confirms" || found[1].Check != "mandatory" || found[2].Check != "persistence" {
		t.Errorf("%+v", found)
	}
}

// A broker that falls silent, before or after the handshake, does not hold the caller up for ever.
func TestDoctor_EndsWhileTheBrokerIsSilent(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]bool{"before the handshake": false, "after it": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, uri := testserver.ProxyAMQP(t, testserver.RabbitMQ(t))
			proxy.Frozen.Store(!after)
			topology := wamqp.NewDurablePubSubConfig(uri+"?heartbeat=3600", nil) // no heartbeat ends it
			topology.Exchange.GenerateName = func(topic string) string {         // called once it is connected
				proxy.Frozen.Store(true)
				return topic
			}
			d, err := rabbitmq.New(topology, rabbitmq.Config{Topics: []string{"orders"}})
			if err != nil {
				t.Fatal(err)
			}
			d.SetLimit(2 * time.Second)
			ended := make(chan error, 1)
			go func() {
				_, err := d.Check(t.Context())
				ended <- err
			}()
			select {
			case err := <-ended:
				if err == nil || strings.Contains(err.Error(), "guest:guest") || proxy.Dials.Load() == 0 {
					t.Errorf("%v, %d connections", err, proxy.Dials.Load())
				}
			case <-time.After(time.Minute):
				t.Fatal("it hangs")
			}
		})
	}
}

func TestNew_ReportsBadAddressesWithoutPasswords(t *testing.T) {
	t.Parallel()
	for name, admin := range map[string]string{"no URL": "admin:hunter2@host:15672", "plaintext": "http://admin:hunter2@example.com:15672"} {
		_, err := rabbitmq.New(wamqp.NewDurableQueueConfig("amqp://localhost"), rabbitmq.Config{Admin: admin})
		var bad *oncemill.ConfigError
		if !errors.As(err, &bad) || bad.Field != "rabbitmq.Config.Admin" || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
