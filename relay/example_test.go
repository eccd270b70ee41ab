package relay_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
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
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
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
