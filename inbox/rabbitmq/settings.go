package rabbitmq

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v4"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
)

// settings is the validated configuration, defaults filled in.
type settings struct {
	Config
	topology wamqp.Config
	tolerant Marshaler // reads what the configured marshaler cannot

	uri     string // holds the password; never shown
	shown   string // uri without it
	amqp    amqp.Config
	tls     *tls.Config
	backoff backoff.ExponentialBackOff
}

type report func(field, value, problem string)

// resolve returns all bad values of both configurations, joined.
func resolve(cfg wamqp.Config, opts Config) (*settings, error) {
	s := &settings{Config: opts, topology: cfg}
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: field, Value: value, Problem: problem})
	}
	s.resolveOptions(bad)
	s.resolveTopology(bad)
	s.resolveConnection(bad)
	s.resolveBackoff(bad)
	return s, errors.Join(errs...)
}

func (s *settings) resolveOptions(bad report) {
	if s.Key == nil {
		s.Key = func(msg *message.Message) string { return msg.Metadata.Get(KeyHeader) }
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
	if s.DialTimeout < 0 {
		bad("rabbitmq.Config.DialTimeout", s.DialTimeout.String(), "must not be negative")
	}
	if s.Logger == nil {
		s.Logger = slog.Default()
	}
}

func (s *settings) resolveTopology(bad report) {
	t := &s.topology
	switch m := t.Marshaler.(type) {
	case nil:
		bad("amqp.Config.Marshaler", "nil", "is needed; the constructors of amqp.Config set it")
	case wamqp.DefaultMarshaler:
		// It refuses deliveries that RabbitMQ itself has added a header to.
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
		if err := table.Validate(); err != nil {
			bad("amqp.Config."+field, "(not shown)", err.Error())
		}
	}
	// What is declared is awaited: a refusal must be met here, and Subscribe must
	// not return before messages are kept.
	t.Exchange.NoWait, t.Queue.NoWait, t.QueueBind.NoWait, t.Consume.NoWait = false, false, false, false
}

func (s *settings) resolveConnection(bad report) {
	c := s.topology.Connection
	if c.AmqpConfig != nil {
		s.amqp = *c.AmqpConfig
		if s.amqp.Recovery != nil {
			bad("amqp.Config.Connection.AmqpConfig.Recovery", "set", "must be nil: the subscriber reconnects by itself")
		}
		if c.TLSConfig != nil && s.amqp.TLSClientConfig != nil {
			bad("amqp.Config.Connection.TLSConfig", "set", "must be nil when AmqpConfig.TLSClientConfig is set")
		}
	}
	s.tls = s.amqp.TLSClientConfig
	if c.TLSConfig != nil {
		s.tls = c.TLSConfig
	}
	if err := s.amqp.Properties.Validate(); err != nil {
		bad("amqp.Config.Connection.AmqpConfig.Properties", "(not shown)", err.Error())
	}
	s.amqp.Properties = maps.Clone(s.amqp.Properties)
	if s.amqp.Properties == nil {
		s.amqp.Properties = amqp.NewConnectionProperties()
		s.amqp.Properties.SetClientConnectionName("oncemill inbox")
	}

	const field = "amqp.Config.Connection.AmqpURI"
	s.uri = c.AmqpURI
	if s.uri == "" {
		bad(field, `""`, "is needed, for example amqps://user:password@host:5671/vhost")
		return
	}
	uri, err := amqp.ParseURI(s.uri)
	if err != nil {
		// The parser's error quotes the URI, and with it the password.
		bad(field, "(not shown)", "is no AMQP URI such as amqps://user:password@host:5671/vhost; reserved characters must be percent-encoded")
		return
	}
	s.shown = redact(uri)
	if uri.Scheme == "amqp" && !s.AllowPlaintext && !loopback(uri.Host) {
		bad(field, strconv.Quote(s.shown), "would cross the network without TLS; use amqps:// or set rabbitmq.Config.AllowPlaintext")
	}
	if uri.Scheme == "amqp" && s.tls != nil {
		bad(field, strconv.Quote(s.shown), "a TLS configuration is set but the scheme is amqp://, which does not use it; use amqps://")
	}
	if s.DialTimeout == 0 {
		s.DialTimeout = defaultDialTimeout
		if uri.ConnectionTimeout > 0 {
			s.DialTimeout = time.Duration(uri.ConnectionTimeout) * time.Millisecond
		}
	}
}

func (s *settings) resolveBackoff(bad report) {
	// With a factor of 1 each wait is spread evenly between nothing and twice
	// the interval: full jitter, at most 2 s.
	s.backoff = backoff.ExponentialBackOff{
		InitialInterval:     50 * time.Millisecond,
		RandomizationFactor: 1,
		Multiplier:          2,
		MaxInterval:         time.Second,
		Stop:                backoff.Stop,
		Clock:               backoff.SystemClock,
	}
	r := s.topology.Connection.Reconnect
	if r == nil {
		return
	}
	const field = "amqp.Config.Connection.Reconnect."
	if r.BackoffInitialInterval <= 0 {
		bad(field+"BackoffInitialInterval", r.BackoffInitialInterval.String(), "must be positive")
	}
	if r.BackoffMaxInterval < r.BackoffInitialInterval {
		bad(field+"BackoffMaxInterval", r.BackoffMaxInterval.String(), "must not be below BackoffInitialInterval")
	}
	if m := r.BackoffMultiplier; math.IsNaN(m) || m < 1 {
		bad(field+"BackoffMultiplier", strconv.FormatFloat(m, 'g', -1, 64), "must be at least 1")
	}
	if f := r.BackoffRandomizationFactor; math.IsNaN(f) || f < 0 || f > 1 {
		bad(field+"BackoffRandomizationFactor", strconv.FormatFloat(f, 'g', -1, 64), "must be 0 to 1")
	}
	s.backoff.InitialInterval = r.BackoffInitialInterval
	s.backoff.MaxInterval = r.BackoffMaxInterval
	s.backoff.Multiplier = r.BackoffMultiplier
	s.backoff.RandomizationFactor = r.BackoffRandomizationFactor
}

// redact shows where the URI leads and as whom, and nothing else of it.
func redact(uri amqp.URI) string {
	return uri.Scheme + "://" + url.PathEscape(uri.Username) + "@" +
		net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)) + "/" + url.PathEscape(uri.Vhost)
}

func loopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
