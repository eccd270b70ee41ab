package forwarder_test

import (
	"context"
	"database/sql"
	"log"
	"os"
	"os/signal"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/forwarder"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// An intake and a relay in the place of Watermill's forwarder.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL")) // where the table watermill_forwarder_topic is
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := runInsteadOfForwarder(ctx, db); err != nil {
		log.Fatal(err)
	}
}

//snippet:from-forwarder
func runInsteadOfForwarder(ctx context.Context, db *sql.DB) error {
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		return err
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		return err
	}
	intake, err := forwarder.New(box, forwarder.Config{
		Topic:         "events_to_forward", // ForwarderTopic of the forwarder's Config
		ConsumerGroup: "forwarder",         // of the forwarder's subscriber
	})
	if err != nil {
		return err
	}
	sink, err := rabbitmq.New(amqp.NewDurablePubSubConfig(os.Getenv("AMQP_URL"), nil), rabbitmq.Config{})
	if err != nil {
		return err
	}
	worker, err := relay.New(box, sink, relay.Config{})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return intake.Run(ctx) })
	group.Go(func() error { return worker.Run(ctx) })
	return group.Wait()
}

//snippet:end
