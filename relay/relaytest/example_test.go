package relaytest_test

import (
	"context"
	"database/sql"
	"errors"
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

// openExample returns a fresh database with an outbox.
func openExample(ctx context.Context) (box *outbox.Outbox, remove func()) {
	dir, err := os.MkdirTemp("", "relaytest-example")
	if err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "orders.db")))
	if err != nil {
		log.Fatal(err)
	}
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		log.Fatal(err)
	}
	box, err = outbox.New(db, outbox.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return box, func() { db.Close(); os.RemoveAll(dir) }
}

// order is the code under test: it announces an order, if there is one.
func order(ctx context.Context, box *outbox.Outbox, item string) error {
	return box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		if err := box.Publisher(tx).Publish("orders", message.NewMessage("order of "+item, nil)); err != nil {
			return err
		}
		if item == "gold" {
			return errors.New("out of stock")
		}
		return nil
	})
}

// What a service publishes, without a broker.
func ExampleDrain() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	box, remove := openExample(ctx)
	defer remove()

	fmt.Println("tea:", order(ctx, box, "tea"))
	fmt.Println("gold:", order(ctx, box, "gold"))

	sink := &relaytest.Sink{}
	if err := relaytest.Drain(ctx, box, sink); err != nil {
		log.Fatal(err)
	}
	for _, m := range sink.Messages() {
		fmt.Printf("%s: %s\n", m.Topic, m.MessageID)
	}
	// Output:
	// tea: <nil>
	// gold: out of stock
	// orders: order of tea
}

// A service whose relay runs all the time, while the broker is away.
func ExampleSink_Wait() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	box, remove := openExample(ctx)
	defer remove()

	sink := &relaytest.Sink{}
	sink.Fail("orders", relay.Unavailable(errors.New("no broker")))
	worker, err := relay.New(box, sink, relay.Config{})
	if err != nil {
		log.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(running) }()

	if err := order(ctx, box, "tea"); err != nil { // does not notice
		log.Fatal(err)
	}
	sink.Fail("orders", nil) // the broker is back
	messages, err := sink.Wait(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(messages[0].MessageID)
	stop()
	if err := <-ended; err != nil {
		log.Fatal(err)
	}
	// Output: order of tea
}
