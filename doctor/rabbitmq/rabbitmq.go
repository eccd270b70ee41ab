// Package rabbitmq looks for exchanges, queues and settings of RabbitMQ that lose messages
// silently.
//
//	d, err := rabbitmq.New(topology, rabbitmq.Config{Topics: []string{"orders"}, Admin: "https://user:password@mq.internal"})
//	...
//	findings, err := d.Check(ctx)
//
// It declares passively and reads the management API; it changes nothing and publishes nothing.
// Without the management API it only sees whether exchanges and queues exist.
package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/doctor"
	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/internal/text"
)

// Config says what is checked.
type Config struct {
	// Topics are those that producers publish to. Their exchanges and queues are named by the
	// topology.
	Topics []string

	// Queues are those of consumers.
	Queues []string

	// Admin is the URL of the management API, with user and password:
	// https://user:password@host:15671. Default: none; bindings and settings of queues are not
	// checked.
	Admin string

	Addresses      []string // further URIs of the cluster
	AllowPlaintext bool     // to hosts that are not loopback
}

// timeLimit is for the checks over AMQP, and for those by the management API.
const timeLimit = 15 * time.Second

// Doctor checks one virtual host. It is safe for concurrent use.
type Doctor struct {
	topology wamqp.Config
	cfg      Config
	conn     amqpconn.Settings
	api      *api // nil: none
	limit    time.Duration
}

// New returns a Doctor. It does not connect yet. Errors hold an [*oncemill.ConfigError] for each
// bad value, without passwords.
func New(topology wamqp.Config, cfg Config) (*Doctor, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: field, Value: value, Problem: problem})
	}
	d := &Doctor{topology: topology, cfg: cfg, limit: timeLimit}
	d.conn = amqpconn.Resolve(topology.Connection, amqpconn.Options{
		Name: "oncemill doctor", Addresses: cfg.Addresses, Who: "the doctor", AllowPlaintext: cfg.AllowPlaintext, MinChannels: 1,
	}, bad)
	if cfg.Admin != "" {
		d.api = newAPI(topology.Connection.AmqpURI, cfg, bad)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return d, nil
}

func newAPI(uri string, cfg Config, bad func(field, value, problem string)) *api {
	const field = "rabbitmq.Config.Admin"
	u, err := url.Parse(cfg.Admin)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		bad(field, "(not shown)", "must be a URL such as https://user:password@host:15671")
		return nil
	}
	if ip := net.ParseIP(u.Hostname()); u.Scheme == "http" && u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) && !cfg.AllowPlaintext {
		bad(field, u.Redacted(), "sends a password without TLS; use https, or set rabbitmq.Config.AllowPlaintext")
	}
	parsed, err := amqp.ParseURI(uri)
	if err != nil {
		return nil // reported by amqpconn
	}
	a := &api{vhost: parsed.Vhost, client: &http.Client{
		Timeout: timeLimit / 3, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	a.password, _ = u.User.Password()
	a.user = u.User.Username()
	u.User = nil
	a.base = u.String()
	return a
}

type findings []doctor.Finding

func (f *findings) add(severity doctor.Severity, check, problem, remedy string) {
	*f = append(*f, doctor.Finding{Check: check, Severity: severity, Problem: problem, Remedy: remedy})
}

// Check makes all checks within 30 s and returns what they find. The error is that of a broker, or
// of a management API, that cannot be reached or refuses.
func (d *Doctor) Check(ctx context.Context) ([]doctor.Finding, error) {
	var found findings
	queues, err := d.declared(ctx, &found)
	if err != nil {
		return nil, fmt.Errorf("doctor: RabbitMQ: %w", err)
	}
	if d.api != nil {
		limited, cancel := context.WithTimeout(ctx, d.limit)
		defer cancel()
		if err := d.managed(limited, queues, &found); err != nil {
			return nil, fmt.Errorf("doctor: management API of RabbitMQ: %w", err)
		}
	}
	return found, nil
}

// Publisher judges the settings of a publisher of watermill-amqp. relay/rabbitmq always uses
// confirms and the mandatory flag, and needs no check.
func Publisher(cfg wamqp.Config) []doctor.Finding {
	var found findings
	if !cfg.Publish.ConfirmDelivery && !cfg.Publish.Transactional {
		found.add(doctor.Error, "confirms", "The publisher does not wait for confirms: what the broker has not stored is lost without an error.",
			"Set Publish.ConfirmDelivery, or publish through the outbox.")
	}
	if !cfg.Publish.Mandatory {
		found.add(doctor.Error, "mandatory", "The publisher does not set the mandatory flag: messages without a queue are lost without an error.",
			"Set Publish.Mandatory and handle returns, or publish through the outbox.")
	}
	if m, ok := cfg.Marshaler.(wamqp.DefaultMarshaler); ok && m.NotPersistentDeliveryMode {
		found.add(doctor.Error, "persistence", "Messages are not persistent: a restart of the broker loses them.", "Unset Marshaler.NotPersistentDeliveryMode.")
	}
	return found
}

// declared declares passively what must exist, and returns the queues that do.
func (d *Doctor) declared(ctx context.Context, found *findings) (queues []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.limit)
	defer cancel()
	var wire net.Conn
	conn, _, err := d.conn.Dialer().Dial(ctx, func(raw net.Conn) (net.Conn, func()) {
		wire = raw
		return raw, func() { _ = raw.Close() } // given up
	})
	if err != nil {
		return nil, err
	}
	// amqp091-go waits for answers without a limit, also while it closes.
	stop := context.AfterFunc(ctx, func() { _ = wire.Close() })
	defer stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}()
	defer conn.Close() //nolint:errcheck // nothing was sent
	passive := func(declare func(*amqp.Channel) error) (exists bool, err error) {
		ch, err := conn.Channel()
		if err != nil {
			return false, err
		}
		defer ch.Close() //nolint:errcheck // a refusal has closed it
		err = declare(ch)
		var refusal *amqp.Error
		switch {
		case errors.As(err, &refusal) && refusal.Code == amqp.NotFound:
			return false, nil
		case errors.As(err, &refusal) && refusal.Code == amqp.ResourceLocked: // an exclusive queue of another connection
			return true, nil
		}
		return err == nil, err
	}
	queue := func(name, whose string) error {
		exists, err := passive(func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive(name, false, false, false, false, nil)
			return err
		})
		switch {
		case err != nil:
			return fmt.Errorf("queue %s: %w", quoted(name), err)
		case !exists:
			found.add(doctor.Error, "queue", fmt.Sprintf("Queue %s of %s does not exist: messages wait in the outbox, and other publishers lose them.", quoted(name), whose),
				"Start the consumer that declares it, or declare it.")
		default:
			queues = append(queues, name)
		}
		return nil
	}
	for _, topic := range d.cfg.Topics {
		exchange := d.topology.Exchange.GenerateName(topic)
		if exchange == "" {
			if err := queue(d.topology.Publish.GenerateRoutingKey(topic), "topic "+quoted(topic)); err != nil {
				return nil, err
			}
			continue
		}
		exists, err := passive(func(ch *amqp.Channel) error {
			return ch.ExchangeDeclarePassive(exchange, d.topology.Exchange.Type, false, false, false, false, nil)
		})
		if err != nil {
			return nil, fmt.Errorf("exchange %s: %w", quoted(exchange), err)
		}
		if !exists {
			found.add(doctor.Error, "exchange", fmt.Sprintf("Exchange %s of topic %s does not exist.", quoted(exchange), quoted(topic)), "Start a consumer that binds to it, or declare it.")
			continue
		}
		if d.api == nil {
			continue
		}
		bound, err := d.api.boundTo(ctx, exchange)
		switch {
		case err != nil:
			return nil, fmt.Errorf("bindings of exchange %s: %w", quoted(exchange), err)
		case len(bound) == 0:
			found.add(doctor.Error, "binding", fmt.Sprintf("Nothing is bound to exchange %s of topic %s: messages wait in the outbox, and other publishers lose them.", quoted(exchange), quoted(topic)),
				"Start the consumer that binds its queue, or bind it.")
		}
		for _, b := range bound {
			if b.Type == "queue" {
				queues = append(queues, b.Destination)
			}
		}
	}
	for _, name := range d.cfg.Queues {
		if err := queue(name, "a consumer"); err != nil {
			return nil, err
		}
	}
	return queues, nil
}

// quoted returns a name in quotes, shortened.
func quoted(name string) string { return text.Quote(name, 64) }
