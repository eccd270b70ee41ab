// Package amqpconn connects to RabbitMQ by watermill-amqp's configuration, for the relay's
// sink and the inbox's subscriber.
package amqpconn

import (
	"crypto/tls"
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
)

// Options are settings that watermill-amqp's configuration lacks.
type Options struct {
	Name           string   // of the connection, shown by RabbitMQ's management
	Addresses      []string // further URIs
	Who            string   // who reconnects, for errors: "the sink"
	AllowPlaintext bool
	DialTimeout    time.Duration // 0: the URI's, or 10 s
	MinChannels    int           // that a connection needs

	// Tolerant replaces headers that amqp091-go cannot read by UnreadableHeader. Without
	// it such a delivery closes the connection.
	Tolerant bool
}

// DefaultDialTimeout is the default limit for dialing and the handshakes.
const DefaultDialTimeout = 10 * time.Second

// Settings are a resolved configuration.
type Settings struct {
	Backoff backoff.ExponentialBackOff

	addresses []address
	config    amqp.Config
	tls       *tls.Config
	tolerant  bool
}

// address is one address of the broker.
type address struct {
	uri         string // holds the password; never to be shown
	plain       string // the URI without TLS, for connections whose TLS this package adds
	shown       string // the URI without the password
	vhost       string
	dialTimeout time.Duration
}

// Shown returns the URIs without their passwords.
func (s *Settings) Shown() string {
	shown := make([]string, len(s.addresses))
	for i, a := range s.addresses {
		shown[i] = a.shown
	}
	return strings.Join(shown, ", ")
}

// Report receives a bad value of a field, and how to correct it.
type Report func(field, value, problem string)

// Resolve returns the settings of a configuration, and reports bad values.
func Resolve(c wamqp.ConnectionConfig, o Options, bad Report) Settings {
	s := Settings{tolerant: o.Tolerant}
	if o.DialTimeout < 0 {
		bad("rabbitmq.Config.DialTimeout", o.DialTimeout.String(), "must not be negative")
	}
	s.resolveConfig(c, o, bad)
	s.resolveAddresses(c.AmqpURI, o, bad)
	s.resolveBackoff(c.Reconnect, bad)
	return s
}

func (s *Settings) resolveConfig(c wamqp.ConnectionConfig, o Options, bad Report) {
	if c.AmqpConfig != nil {
		s.config = *c.AmqpConfig
		if s.config.Recovery != nil {
			bad("amqp.Config.Connection.AmqpConfig.Recovery", "set", "must be nil: "+o.Who+" reconnects by itself")
		}
		if c.TLSConfig != nil && s.config.TLSClientConfig != nil {
			bad("amqp.Config.Connection.TLSConfig", "set", "must be nil when AmqpConfig.TLSClientConfig is set")
		}
		if m := int(s.config.ChannelMax); m != 0 && m < o.MinChannels {
			bad("amqp.Config.Connection.AmqpConfig.ChannelMax", strconv.Itoa(m), o.tooFewChannels())
		}
	}
	s.tls = s.config.TLSClientConfig
	if c.TLSConfig != nil {
		s.tls = c.TLSConfig
	}
	if err := CheckTable(s.config.Properties); err != nil {
		bad("amqp.Config.Connection.AmqpConfig.Properties", "(not shown)", err.Error())
	}
	s.config.Properties = maps.Clone(s.config.Properties)
	if s.config.Properties == nil {
		s.config.Properties = amqp.NewConnectionProperties()
		s.config.Properties.SetClientConnectionName(o.Name)
	}
}

func (o Options) tooFewChannels() string {
	return "must be 0 or at least " + strconv.Itoa(o.MinChannels) + ", the number of channels that a connection needs"
}

func (s *Settings) resolveAddresses(first string, o Options, bad Report) {
	if first != "" || len(o.Addresses) == 0 {
		s.resolveAddress("amqp.Config.Connection.AmqpURI", first, o, bad)
	}
	for i, text := range o.Addresses {
		s.resolveAddress("rabbitmq.Config.Addresses["+strconv.Itoa(i)+"]", text, o, bad)
	}
}

// resolveAddress checks one URI and adds it to the addresses.
func (s *Settings) resolveAddress(field, text string, o Options, bad Report) {
	if text == "" {
		bad(field, `""`, "is required, for example amqps://user:password@host:5671/vhost")
		return
	}
	uri, err := amqp.ParseURI(text)
	if err != nil {
		// The parser's error quotes the URI, and with it the password.
		bad(field, "(not shown)", "is not an AMQP URI such as amqps://user:password@host:5671/vhost; reserved characters must be percent-encoded")
		return
	}
	a := address{uri: text, plain: withoutTLS(text, uri), shown: redact(uri), vhost: uri.Vhost, dialTimeout: o.DialTimeout}
	wrong := func(problem string) { bad(field, strconv.Quote(a.shown), problem) }
	for _, m := range uri.AuthMechanism {
		switch strings.ToUpper(m) {
		case "PLAIN", "AMQPLAIN", "EXTERNAL":
		default:
			wrong("auth_mechanism must be plain, amqplain or external")
		}
	}
	if m := int(uri.ChannelMax); m != 0 && m < o.MinChannels {
		wrong("channel_max " + o.tooFewChannels())
	}
	if uri.Scheme == "amqp" && !o.AllowPlaintext && !loopback(uri.Host) {
		wrong("would cross the network without TLS; use amqps:// or set rabbitmq.Config.AllowPlaintext")
	}
	if uri.Scheme == "amqp" && s.tls != nil {
		wrong("a TLS configuration is set but the scheme is amqp://, which does not use it; use amqps://")
	}
	if len(s.addresses) > 0 && s.addresses[0].vhost != a.vhost {
		wrong("must name the same virtual host as " + strconv.Quote(s.addresses[0].shown))
	}
	if a.dialTimeout == 0 {
		a.dialTimeout = DefaultDialTimeout
		if uri.ConnectionTimeout != 0 {
			a.dialTimeout = time.Duration(uri.ConnectionTimeout) * time.Millisecond
		}
		if a.dialTimeout < 0 {
			wrong("connection_timeout must not be negative")
		}
	}
	s.addresses = append(s.addresses, a)
}

func (s *Settings) resolveBackoff(r *wamqp.ReconnectConfig, bad Report) {
	// With a factor of 1 each wait is random between zero and twice the interval: full
	// jitter, at most 2 s.
	s.Backoff = backoff.ExponentialBackOff{
		InitialInterval:     50 * time.Millisecond,
		RandomizationFactor: 1,
		Multiplier:          2,
		MaxInterval:         time.Second,
		Stop:                backoff.Stop,
		Clock:               backoff.SystemClock,
	}
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
	s.Backoff.InitialInterval = r.BackoffInitialInterval
	s.Backoff.MaxInterval = r.BackoffMaxInterval
	s.Backoff.Multiplier = r.BackoffMultiplier
	s.Backoff.RandomizationFactor = r.BackoffRandomizationFactor
}

// redact returns the URI with user, host and virtual host only.
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
