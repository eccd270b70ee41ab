package rabbitmq_test

import (
	"context"
	"database/sql"
	"log"
	"os"
	"os/signal"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	_ "github.com/lib/pq"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// A worker that relays an outbox on PostgreSQL to RabbitMQ, one fanout exchange
// for each topic.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()

	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sink, err := rabbitmq.New(amqp.NewDurablePubSubConfig(os.Getenv("AMQP_URL"), nil), rabbitmq.Config{})
	if err != nil {
		log.Fatal(err)
	}
	worker, err := relay.New(box, sink, relay.Config{})
	if err != nil {
		log.Fatal(err)
	}
	if err := worker.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
