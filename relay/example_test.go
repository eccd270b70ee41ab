package relay_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
	"github.com/oncemill/oncemill/relay/relaytest"
)

// Orders go to one broker, all the rest to another.
func ExampleNewRouter() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "router-example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "orders.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		log.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		log.Fatal(err)
	}

	orders, rest := &relaytest.Sink{}, &relaytest.Sink{} // relay/rabbitmq, say, and FromPublisher of something
	router, err := relay.NewRouter(
		relay.Route{Topics: "orders.#", Sink: orders},
		relay.Route{Topics: "#", Sink: rest},
	)
	if err != nil {
		log.Fatal(err)
	}

	err = box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		for _, topic := range []string{"orders.created", "stock.low"} {
			if err := box.Publisher(tx).Publish(topic, message.NewMessage("1 to "+topic, nil)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := relaytest.Drain(ctx, box, router); err != nil {
		log.Fatal(err)
	}
	fmt.Println("orders:", orders.Messages()[0].MessageID)
	fmt.Println("rest:", rest.Messages()[0].MessageID)
	// Output:
	// orders: 1 to orders.created
	// rest: 1 to stock.low
}

// An intake and a relay in the place of Watermill's forwarder.
func ExampleFromForwarder() {
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
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		return err
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		return err
	}
	intake, err := relay.FromForwarder(box, relay.ForwarderConfig{
		Topic:         "events_to_forward", // forwarder.Config.ForwarderTopic
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
