package rabbitmq

import (
	"cmp"
	"errors"
	"log/slog"
	"math"
	"strconv"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/amqpconn"
)

// settings is the validated configuration, defaults filled in.
type settings struct {
	Config
	topology wamqp.Config
	tolerant Marshaler // reads what the configured marshaler cannot
	conn     amqpconn.Settings
}

// resolve returns all bad values of both configurations, joined.
func resolve(cfg wamqp.Config, opts Config) (*settings, error) {
	s := &settings{Config: opts, topology: cfg}
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: field, Value: value, Problem: problem})
	}
	s.resolveOptions(bad)
	s.resolveTopology(bad)
	s.resolveShards(bad)
	s.conn = amqpconn.Resolve(cfg.Connection, amqpconn.Options{
		Name: "oncemill inbox", Who: "the subscriber", Addresses: opts.Addresses,
		AllowPlaintext: opts.AllowPlaintext, DialTimeout: opts.DialTimeout, Tolerant: true,
	}, bad)
	return s, errors.Join(errs...)
}

func (s *settings) resolveOptions(bad amqpconn.Report) {
	if s.Key == nil {
		header := cmp.Or(s.Shards.Header, KeyHeader)
		s.Key = func(msg *message.Message) string { return msg.Metadata.Get(header) }
	}
	atLeast := func(field string, value *time.Duration, normal, least time.Duration) {
		if *value == 0 {
			*value = normal
		}
		if *value < least {
			bad("rabbitmq.Config."+field, value.String(), "must be at least "+least.String())
		}
	}
	atLeast("NackDelay", &s.NackDelay, defaultNackDelay, time.Millisecond)
	atLeast("NackDelayMax", &s.NackDelayMax, max(defaultNackDelayMax, s.NackDelay), time.Millisecond)
	if s.NackDelayMax < s.NackDelay {
		bad("rabbitmq.Config.NackDelayMax", s.NackDelayMax.String(), "must not be below NackDelay")
	}
	atLeast("AckTimeout", &s.AckTimeout, defaultAckTimeout, time.Second)
	atLeast("CloseTimeout", &s.CloseTimeout, defaultCloseTimeout, time.Millisecond)
	atLeast("CallTimeout", &s.CallTimeout, defaultCallTimeout, time.Millisecond)
	if s.Backlog == 0 {
		s.Backlog = defaultBacklog
	}
	if s.Backlog < 1 {
		bad("rabbitmq.Config.Backlog", strconv.Itoa(s.Backlog), "must be positive, or 0 for "+strconv.Itoa(defaultBacklog))
	}
	if s.Logger == nil {
		s.Logger = slog.Default()
	}
	if s.MeterProvider == nil {
		s.MeterProvider = otel.GetMeterProvider()
	}
}

func (s *settings) resolveTopology(bad amqpconn.Report) {
	t := &s.topology
	switch m := t.Marshaler.(type) {
	case nil:
		bad("amqp.Config.Marshaler", "nil", "is needed; the constructors of amqp.Config set it")
	case wamqp.DefaultMarshaler:
		// watermill-amqp's default refuses deliveries to which RabbitMQ itself has added a
		// header.
		s.tolerant.Stock = m
		t.Marshaler = s.tolerant
	case Marshaler:
		s.tolerant = m
	}
	if t.Exchange.GenerateName == nil {
		bad("amqp.Config.Exchange.GenerateName", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.Queue.GenerateName == nil {
		bad("amqp.Config.Queue.GenerateName", "nil", "is needed, for example amqp.GenerateQueueNameTopicNameWithSuffix(\"stock\")")
	}
	if t.QueueBind.GenerateRoutingKey == nil {
		bad("amqp.Config.QueueBind.GenerateRoutingKey", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.TopologyBuilder == nil {
		bad("amqp.Config.TopologyBuilder", "nil", "is needed; the constructors of amqp.Config set it")
	}
	qos := t.Consume.Qos
	if qos.PrefetchCount < 1 || qos.PrefetchCount > math.MaxUint16 {
		bad("amqp.Config.Consume.Qos.PrefetchCount", strconv.Itoa(qos.PrefetchCount), "must be 1 to 65535: it is the number of messages in flight")
	}
	if qos.PrefetchSize != 0 {
		bad("amqp.Config.Consume.Qos.PrefetchSize", strconv.Itoa(qos.PrefetchSize), "must be 0: RabbitMQ does not have it")
	}
	if qos.Global {
		bad("amqp.Config.Consume.Qos.Global", "true", "must be false: quorum queues refuse it")
	}
	for field, table := range map[string]amqp.Table{
		"Exchange.Arguments":  t.Exchange.Arguments,
		"Queue.Arguments":     t.Queue.Arguments,
		"QueueBind.Arguments": t.QueueBind.Arguments,
		"Consume.Arguments":   t.Consume.Arguments,
	} {
		if err := amqpconn.CheckTable(table); err != nil {
			bad("amqp.Config."+field, "(not shown)", err.Error())
		}
	}
	// Declarations are awaited: a refusal must be noticed here, and Subscribe must not
	// return before messages are kept.
	t.Exchange.NoWait, t.Queue.NoWait, t.QueueBind.NoWait, t.Consume.NoWait = false, false, false, false
}
