package inbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
)

// An order is delivered three times, and the stock is reduced once.
func ExampleInbox_Middleware() {
	dir, err := os.MkdirTemp("", "oncemill")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary file
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "stock.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // read to its end
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, inbox.Migrations); err != nil {
		log.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, `create table stock as select 'tea' as item, 10 as pieces`); err != nil {
		log.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		log.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Outbox: box})
	if err != nil {
		log.Fatal(err)
	}

	reserve := func(msg *message.Message) ([]*message.Message, error) {
		tx, _ := inbox.TxFromContext(msg.Context())
		if _, err := tx.ExecContext(msg.Context(), `update stock set pieces = pieces - 3 where item = 'tea'`); err != nil {
			return nil, err
		}
		// Goes to the outbox, in the same transaction.
		return []*message.Message{message.NewMessage("reserved-"+msg.UUID, nil)}, nil
	}

	// GoChannel stands for RabbitMQ.
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddHandler("reserve", "orders", broker, "reservations", box.ContextPublisher(), reserve).AddMiddleware(in.Middleware)
	stopped := make(chan error)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	for range 3 {
		if err := broker.Publish("orders", message.NewMessage("order-1", nil)); err != nil {
			log.Fatal(err)
		}
	}
	cancel()
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}

	var pieces, owed int
	if err := db.QueryRow(`select pieces, (select count(*) from oncemill_outbox) from stock`).Scan(&pieces, &owed); err != nil {
		log.Fatal(err)
	}
	fmt.Println("pieces left:", pieces)
	fmt.Println("messages in the outbox:", owed)
	// Output:
	// pieces left: 7
	// messages in the outbox: 1
}
