package verify

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Access is how the servers are reached, and what a run may touch there: the schema of this
// name, and the exchanges and queues whose names begin with it.
type Access struct {
	Database       string   // URL of PostgreSQL
	AMQP           []string // URLs of the nodes of RabbitMQ
	AllowPlaintext bool     // to a RabbitMQ that is not loopback
	Schema         string
}

// NamePrefix begins the names of everything that a run creates.
const NamePrefix = "oncemill_verify_"

const (
	dialTimeout   = 10 * time.Second
	removeTimeout = time.Minute
)

func (a *Access) database() oncemill.Config {
	return oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: a.Schema}
}

func (a *Access) application(process string) string { return a.Schema + "/" + process }

func (a *Access) connector(process string) (*pq.Connector, error) {
	cfg, err := pq.NewConfig(a.Database)
	if err != nil {
		return nil, errors.New("the URL of the database cannot be parsed") // the cause would show the password
	}
	cfg.ApplicationName = a.application(process)
	return pq.NewConnectorConfig(cfg)
}

func (a *Access) topic(consumer string) string {
	if consumer == roleFirst {
		return a.Schema + "_orders"
	}
	return a.Schema + "_receipts"
}

func (a *Access) queue(consumer string) string { return a.topic(consumer) + "_" + consumer }

func (a *Access) mirror() string { return a.Schema + "_mirror" }

// dial connects to the first node that answers.
func (a *Access) dial() (*amqp091.Connection, error) {
	var errs []error
	for _, uri := range a.AMQP {
		properties := amqp091.NewConnectionProperties()
		properties.SetClientConnectionName(a.application("verify"))
		conn, err := amqp091.DialConfig(uri, amqp091.Config{Dial: amqp091.DefaultDial(dialTimeout), Properties: properties})
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("connect to RabbitMQ: %w", errors.Join(errs...))
}

// onChannel runs requests on a connection of their own.
func (a *Access) onChannel(requests func(ch *amqp091.Channel) error) (err error) {
	conn, err := a.dial()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return requests(ch)
}

// scratch is what a run has created.
type scratch struct {
	*Access
	db     *sql.DB
	texts  *texts
	schema bool                              // it was created
	undo   []func(ch *amqp091.Channel) error // removes an exchange or a queue, the last one first
	names  []string                          // of what undo removes
}

// ErrExists is returned when something of the name exists already.
var ErrExists = errors.New("exists already, and was left alone")

// create creates everything, or fails before it has touched what exists. The caller removes what
// was created in both cases.
func (s *scratch) create(ctx context.Context) error {
	if err := s.refuse(ctx); err != nil {
		return err
	}
	if _, err := s.db.ExecContext(ctx, s.texts.CreateSchema); err != nil {
		return fmt.Errorf("create schema %s: %w", s.Schema, err)
	}
	s.schema = true
	if _, err := s.db.ExecContext(ctx, s.texts.CreateTables); err != nil {
		return fmt.Errorf("create the tables: %w", err)
	}
	return s.onChannel(func(ch *amqp091.Channel) error {
		for _, consumer := range []string{roleFirst, roleSecond} {
			topic := s.topic(consumer)
			if err := ch.ExchangeDeclare(topic, amqp091.ExchangeFanout, true, false, false, false, nil); err != nil {
				return fmt.Errorf("create exchange %s: %w", topic, err)
			}
			s.created("exchange "+topic, func(ch *amqp091.Channel) error { return ch.ExchangeDelete(topic, false, false) })
			if err := s.declare(ch, s.queue(consumer), queueArguments(consumer), topic); err != nil {
				return err
			}
		}
		return s.declare(ch, s.mirror(), nil, s.topic(roleFirst), s.topic(roleSecond))
	})
}

func (s *scratch) declare(ch *amqp091.Channel, queue string, arguments amqp091.Table, topics ...string) error {
	if _, err := ch.QueueDeclare(queue, true, false, false, false, arguments); err != nil {
		return fmt.Errorf("create queue %s: %w", queue, err)
	}
	s.created("queue "+queue, func(ch *amqp091.Channel) error {
		_, err := ch.QueueDelete(queue, false, false, false)
		return err
	})
	for _, topic := range topics {
		if err := ch.QueueBind(queue, "", topic, false, nil); err != nil {
			return fmt.Errorf("bind queue %s: %w", queue, err)
		}
	}
	return nil
}

func (s *scratch) created(name string, undo func(ch *amqp091.Channel) error) {
	s.names, s.undo = append(s.names, name), append(s.undo, undo)
}

// refuse returns an error if anything exists that the run would create.
func (s *scratch) refuse(ctx context.Context) error {
	var exists bool
	if err := s.db.QueryRowContext(ctx, s.texts.SchemaExists, s.Schema).Scan(&exists); err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	if exists {
		return fmt.Errorf("schema %s %w", s.Schema, ErrExists)
	}
	conn, err := s.dial()
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing depends on it
	absent := func(what, name string, look func(ch *amqp091.Channel) error) error {
		ch, err := conn.Channel() // which the answer that there is none closes
		if err != nil {
			return err
		}
		err = look(ch)
		var answer *amqp091.Error
		switch {
		case err == nil:
			return fmt.Errorf("%s %s %w", what, name, ErrExists)
		case errors.As(err, &answer) && answer.Code == amqp091.NotFound:
			return nil
		}
		return fmt.Errorf("look for %s %s: %w", what, name, err)
	}
	for _, name := range []string{s.topic(roleFirst), s.topic(roleSecond)} {
		err := absent("exchange", name, func(ch *amqp091.Channel) error {
			return ch.ExchangeDeclarePassive(name, amqp091.ExchangeFanout, true, false, false, false, nil)
		})
		if err != nil {
			return err
		}
	}
	for _, name := range []string{s.queue(roleFirst), s.queue(roleSecond), s.mirror()} {
		err := absent("queue", name, func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes what was created, also after ctx has ended, and says what is left if it cannot.
func (s *scratch) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	var err error
	for first := true; first || sleep.For(ctx, time.Second); first = false {
		if err = errors.Join(s.dropSchema(ctx), s.dropQueues()); err == nil {
			return nil
		}
	}
	left := s.names
	if s.schema {
		left = append([]string{"schema " + s.Schema}, left...)
	}
	return fmt.Errorf("not removed: %s: %w", strings.Join(left, ", "), err)
}

func (s *scratch) dropSchema(ctx context.Context) error {
	if !s.schema {
		return nil
	}
	if _, err := s.db.ExecContext(ctx, s.texts.DropSchema); err != nil {
		return err
	}
	s.schema = false
	return nil
}

func (s *scratch) dropQueues() error {
	if len(s.undo) == 0 {
		return nil
	}
	return s.onChannel(func(ch *amqp091.Channel) error {
		for n := len(s.undo) - 1; n >= 0; n-- {
			if err := s.undo[n](ch); err != nil {
				return err
			}
			s.undo, s.names = s.undo[:n], s.names[:n]
		}
		return nil
	})
}

// Setting is a fact about the servers.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// describe returns what the servers show about themselves, without passwords. shared says that
// two connections have the same backend: a pooler in transaction mode is in between.
func (s *scratch) describe(ctx context.Context) (postgres, rabbitmq []Setting, shared bool, err error) {
	cfg, err := pq.NewConfig(s.Database)
	if err != nil {
		return nil, nil, false, errors.New("the URL of the database cannot be parsed")
	}
	if err := rows(ctx, s.db, s.texts.Settings, func(f *Setting) []any { return []any{&f.Name, &f.Value} }, &postgres); err != nil {
		return nil, nil, false, err
	}
	tls := "unknown"
	if err := s.db.QueryRowContext(ctx, s.texts.TLS).Scan(&tls); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, nil, false, err
	}
	if shared, err = s.sharesBackends(ctx); err != nil {
		return nil, nil, false, err
	}
	pooler := "none seen; one in session mode cannot be seen"
	if shared {
		pooler = "in transaction mode: connections share backends"
	}
	postgres = append([]Setting{
		{"address", net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port))) + "/" + cfg.Database},
		{"user", cfg.User},
		{"sslmode", string(cfg.SSLMode)},
		{"TLS of the server's session", tls},
		{"pooler", pooler},
	}, postgres...)
	conn, err := s.dial()
	if err != nil {
		return nil, nil, false, err
	}
	defer conn.Close() //nolint:errcheck // nothing depends on it
	for i, text := range s.AMQP {
		uri, err := amqp091.ParseURI(text)
		if err != nil {
			return nil, nil, false, errors.New("the URL of RabbitMQ cannot be parsed") // the cause would show the password
		}
		rabbitmq = append(rabbitmq, Setting{
			fmt.Sprintf("address %d", i+1),
			uri.Scheme + "://" + net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)) + ", virtual host " + uri.Vhost + ", user " + uri.Username,
		})
	}
	for _, name := range []string{"product", "version", "cluster_name"} {
		if value, ok := conn.Properties[name].(string); ok {
			rabbitmq = append(rabbitmq, Setting{name, value})
		}
	}
	return postgres, append(rabbitmq, Setting{"heartbeat", conn.Config.Heartbeat.String()}), shared, nil
}

// sharesBackends reports whether two open connections have the same backend, or one of them
// another one for each transaction.
func (s *scratch) sharesBackends(ctx context.Context) (bool, error) {
	conns, owner := make([]*sql.Conn, 2), map[int]int{}
	for i := range conns {
		conn, err := s.db.Conn(ctx)
		if err != nil {
			return false, err
		}
		defer conn.Close() //nolint:errcheck // it returns to the pool
		conns[i] = conn
	}
	for range 2 {
		for i, conn := range conns {
			var pid int
			if err := conn.QueryRowContext(ctx, s.texts.Backend).Scan(&pid); err != nil {
				return false, err
			}
			if other, known := owner[pid]; known && other != i {
				return true, nil
			}
			owner[pid] = i
		}
	}
	return len(owner) != len(conns), nil
}
