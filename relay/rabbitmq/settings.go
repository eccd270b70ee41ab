package rabbitmq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/cenkalti/backoff/v4"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
)

// minChannels is what one connection needs: a channel for each of the outbox's
// 32 lanes and one for declarations.
const minChannels = 33

// settings is the validated configuration, defaults filled in.
type settings struct {
	Config
	topology wamqp.Config
	encoder  encoder

	uri     string // holds the password; never shown
	shown   string // uri without it
	amqp    amqp.Config
	tls     *tls.Config
	backoff backoff.ExponentialBackOff
}

// resolve returns all bad values of both configurations, joined.
func resolve(cfg wamqp.Config, opts Config) (*settings, error) {
	s := &settings{Config: opts, topology: cfg, encoder: newEncoder(cfg.Marshaler)}
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

func (s *settings) resolveOptions(bad func(field, value, problem string)) {
	if s.Window == 0 {
		s.Window = defaultWindow
	}
	if s.Window < 1 || s.Window > maxWindow {
		bad("rabbitmq.Config.Window", strconv.Itoa(s.Window), "must be 1 to 10000 messages")
	}
	if s.WriteBuffer == 0 {
		s.WriteBuffer = defaultWriteBuffer
	}
	if s.WriteBuffer < minWriteBuffer {
		bad("rabbitmq.Config.WriteBuffer", strconv.Itoa(s.WriteBuffer), "must be at least 4096 bytes")
	}
	if s.CallTimeout == 0 {
		s.CallTimeout = defaultCallTimeout
	}
	if s.ConfirmTimeout == 0 {
		s.ConfirmTimeout = defaultConfirmTimeout
	}
	for field, timeout := range map[string]time.Duration{
		"rabbitmq.Config.DialTimeout":    s.DialTimeout,
		"rabbitmq.Config.CallTimeout":    s.CallTimeout,
		"rabbitmq.Config.ConfirmTimeout": s.ConfirmTimeout,
	} {
		if timeout < 0 {
			bad(field, timeout.String(), "must not be negative")
		}
	}
	if s.Logger == nil {
		s.Logger = slog.Default()
	}
}

func (s *settings) resolveTopology(bad func(field, value, problem string)) {
	t := &s.topology
	if t.Marshaler == nil {
		bad("amqp.Config.Marshaler", "nil", "is needed; the constructors of amqp.Config set it")
	}
	switch header := s.encoder.stockHeader; {
	case checkShort(header) != "":
		bad("amqp.Config.Marshaler.MessageUUIDHeaderKey", fmt.Sprintf("%.40q", header), checkShort(header))
	case header == idHeader, header == keyHeader:
		bad("amqp.Config.Marshaler.MessageUUIDHeaderKey", strconv.Quote(header), "is a header of the sink's")
	}
	if t.Exchange.GenerateName == nil {
		bad("amqp.Config.Exchange.GenerateName", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.Publish.GenerateRoutingKey == nil {
		bad("amqp.Config.Publish.GenerateRoutingKey", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.TopologyBuilder == nil {
		bad("amqp.Config.TopologyBuilder", "nil", "is needed; the constructors of amqp.Config set it")
	}
	if t.Publish.Transactional {
		bad("amqp.Config.Publish.Transactional", "true", "must be false: AMQP has no confirms in transactions")
	}
	if t.Publish.Immediate {
		bad("amqp.Config.Publish.Immediate", "true", "must be false: RabbitMQ closes the connection on it")
	}
	if err := checkTable(t.Exchange.Arguments); err != nil {
		bad("amqp.Config.Exchange.Arguments", "(not shown)", err.Error())
	}
	// A declaration that nobody waits for would race with the publishing, which
	// goes over other channels.
	t.Exchange.NoWait = false
}

func (s *settings) resolveConnection(bad func(field, value, problem string)) {
	c := s.topology.Connection
	if c.AmqpConfig != nil {
		s.amqp = *c.AmqpConfig
		if s.amqp.Recovery != nil {
			bad("amqp.Config.Connection.AmqpConfig.Recovery", "set", "must be nil: the sink reconnects by itself")
		}
		if c.TLSConfig != nil && s.amqp.TLSClientConfig != nil {
			bad("amqp.Config.Connection.TLSConfig", "set", "must be nil when AmqpConfig.TLSClientConfig is set")
		}
		if m := s.amqp.ChannelMax; m != 0 && m < minChannels {
			bad("amqp.Config.Connection.AmqpConfig.ChannelMax", strconv.Itoa(int(m)), "must be 0 or at least 33: one channel for each of 32 lanes and one for declarations")
		}
	}
	s.tls = s.amqp.TLSClientConfig
	if c.TLSConfig != nil {
		s.tls = c.TLSConfig
	}
	if err := checkTable(s.amqp.Properties); err != nil {
		bad("amqp.Config.Connection.AmqpConfig.Properties", "(not shown)", err.Error())
	}
	s.amqp.Properties = maps.Clone(s.amqp.Properties)
	if s.amqp.Properties == nil {
		s.amqp.Properties = amqp.NewConnectionProperties()
		s.amqp.Properties.SetClientConnectionName("oncemill relay")
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
	for _, m := range uri.AuthMechanism {
		switch strings.ToUpper(m) {
		case "PLAIN", "AMQPLAIN", "EXTERNAL":
		default:
			bad(field, strconv.Quote(s.shown), "auth_mechanism must be plain, amqplain or external")
		}
	}
	if uri.ChannelMax != 0 && uri.ChannelMax < minChannels {
		bad(field, strconv.Quote(s.shown), "channel_max must be 0 or at least 33: one channel for each of 32 lanes and one for declarations")
	}
	if uri.Scheme == "amqp" && !s.AllowPlaintext && !loopback(uri.Host) {
		bad(field, strconv.Quote(s.shown), "would cross the network without TLS; use amqps:// or set rabbitmq.Config.AllowPlaintext")
	}
	if uri.Scheme == "amqp" && s.tls != nil {
		bad(field, strconv.Quote(s.shown), "a TLS configuration is set but the scheme is amqp://, which does not use it; use amqps://")
	}
	if s.DialTimeout == 0 {
		s.DialTimeout = defaultDialTimeout
		if uri.ConnectionTimeout != 0 {
			s.DialTimeout = time.Duration(uri.ConnectionTimeout) * time.Millisecond
		}
		if s.DialTimeout < 0 {
			bad(field, strconv.Quote(s.shown), "connection_timeout must not be negative")
		}
	}
}

func (s *settings) resolveBackoff(bad func(field, value, problem string)) {
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
		bad(field+"BackoffMultiplier", strconv.FormatFloat(r.BackoffMultiplier, 'g', -1, 64), "must be at least 1")
	}
	if f := r.BackoffRandomizationFactor; math.IsNaN(f) || f < 0 || f > 1 {
		bad(field+"BackoffRandomizationFactor", strconv.FormatFloat(r.BackoffRandomizationFactor, 'g', -1, 64), "must be 0 to 1")
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
