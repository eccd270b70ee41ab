package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/url"
	"os"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	_ "github.com/lib/pq" // the driver "postgres"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/internal/demo"
)

// settings are what every command has to know.
type settings struct {
	postgres string
	amqp     string
	schema   string // of the shop's tables; oncemill's are beside it
	topic    string // also the name of the exchange
	parent   string // address of the demo that started this process, or ""
	logger   *slog.Logger
}

func (s *settings) flags(command string) *flag.FlagSet {
	s.logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	flags := flag.NewFlagSet("orders "+command, flag.ContinueOnError)
	flags.StringVar(&s.postgres, "postgres", os.Getenv("ONCEMILL_TEST_POSTGRES"), "postgres:// URL of the database")
	flags.StringVar(&s.amqp, "amqp", os.Getenv("ONCEMILL_TEST_AMQP"), "amqp:// URL of RabbitMQ")
	flags.StringVar(&s.schema, "schema", "shop", "schema of the shop's tables")
	flags.StringVar(&s.topic, "topic", "orders", "topic and exchange of the messages")
	flags.StringVar(&s.parent, "parent", "", "address of the demo that started this process")
	return flags
}

var errNoServers = errors.New("PostgreSQL or RabbitMQ is not named\n" +
	`give -postgres and -amqp, or run first: eval "$(scripts/servers.sh up)"`)

func (s *settings) check() error {
	if s.postgres == "" || s.amqp == "" {
		return errNoServers
	}
	return nil
}

// open returns the database with the shop's schema in front.
func (s *settings) open() (*sql.DB, error) {
	address, err := url.Parse(s.postgres)
	if err != nil {
		return nil, errors.New("-postgres is not a URL") // the cause would show the password
	}
	query := address.Query()
	query.Set("search_path", s.schema)
	query.Set("binary_parameters", "yes") // a statement with arguments takes one round trip instead of two
	address.RawQuery = query.Encode()
	db, err := sql.Open("postgres", address.String())
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db.SetMaxOpenConns(maxConnections)
	db.SetMaxIdleConns(maxConnections)
	return db, nil
}

// maxConnections is as many as the demo's client has customers at once.
const maxConnections = 16

// tables says where oncemill's tables are. All commands say the same.
func (s *settings) tables() oncemill.Config {
	return oncemill.Config{Schema: s.schema + "_mill"}
}

// rabbit is Watermill's stock configuration: a durable fanout exchange named like
// the topic, and a durable queue for each consumer.
func (s *settings) rabbit() amqp.Config {
	return amqp.NewDurablePubSubConfig(s.amqp, amqp.GenerateQueueNameTopicNameWithSuffix("inventory"))
}

// runUnder runs work with a line to the demo that started this process, or on
// its own: then worker is nil.
func (s *settings) runUnder(ctx context.Context, work func(ctx context.Context, worker *demo.Worker) error) error {
	if s.parent == "" {
		return work(ctx, nil)
	}
	worker, err := demo.Dial(ctx, s.parent)
	if err != nil {
		return err
	}
	return worker.Run(ctx, func(ctx context.Context) error { return work(ctx, worker) })
}
