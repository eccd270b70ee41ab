package inbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"golang.org/x/sync/errgroup"
	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
)

// openExample opens a database in a temporary file.
func openExample() (db *sql.DB, remove func()) {
	dir, err := os.MkdirTemp("", "oncemill")
	if err != nil {
		log.Fatal(err)
	}
	db, err = sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "stock.db")))
	if err != nil {
		log.Fatal(err)
	}
	return db, func() {
		_ = db.Close() // read to its end
		_ = os.RemoveAll(dir)
	}
}

// An order is delivered three times, and the stock is reduced once.
func ExampleInbox_Middleware() {
	db, remove := openExample()
	defer remove()
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

// Three orders that come at once are one statement, and a copy of one is none.
func ExampleInbox_Batch() {
	db, remove := openExample()
	defer remove()
	if err := oncemill.Migrate(context.Background(), db, oncemill.Config{}, inbox.Migrations); err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec(`create table reserved (order_id text)`); err != nil {
		log.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Group: inbox.Group{Size: 3, Wait: time.Second}})
	if err != nil {
		log.Fatal(err)
	}

	// For router.AddConsumerHandler("reserve", "orders", subscriber, reserve).
	reserve := in.Batch(func(ctx context.Context, orders []*message.Message) error {
		tx, _ := inbox.TxFromContext(ctx)
		query, ids := `insert into reserved (order_id) values `, []any{}
		for i, order := range orders {
			query += fmt.Sprintf("%s($%d)", []string{"", ","}[min(i, 1)], i+1)
			ids = append(ids, order.UUID)
		}
		fmt.Println("orders:", len(orders))
		_, err := tx.ExecContext(ctx, query, ids...)
		return err
	})

	var delivered errgroup.Group
	for _, id := range []string{"order-1", "order-2", "order-3"} {
		delivered.Go(func() error { return reserve(message.NewMessage(id, nil)) })
	}
	if err := delivered.Wait(); err != nil {
		log.Fatal(err)
	}
	if err := reserve(message.NewMessage("order-1", nil)); err != nil {
		log.Fatal(err)
	}
	var reserved int
	if err := db.QueryRow(`select count(*) from reserved`).Scan(&reserved); err != nil {
		log.Fatal(err)
	}
	fmt.Println("reserved:", reserved)
	// Output:
	// orders: 3
	// reserved: 3
}
