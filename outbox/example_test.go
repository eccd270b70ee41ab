package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
)

// openExample returns a fresh database with an outbox and a table of stock.
func openExample(ctx context.Context) (box *outbox.Outbox, remove func()) {
	dir, err := os.MkdirTemp("", "outbox-example")
	if err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "orders.db")))
	if err != nil {
		log.Fatal(err)
	}
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations); err != nil {
		log.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, `create table stock (item text primary key, quantity integer check (quantity >= 0)); insert into stock values ('tea', 1)`); err != nil {
		log.Fatal(err)
	}
	box, err = outbox.New(db, outbox.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return box, func() { db.Close(); os.RemoveAll(dir) }
}

// The order is taken from stock and announced, or neither: the second order
// finds no tea, and leaves no message.
func ExampleOutbox_RunInTx() {
	ctx := context.Background()
	box, remove := openExample(ctx)
	defer remove()

	order := func(id string) error {
		return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			// First the write that serializes the key, then the message.
			if _, err := tx.ExecContext(ctx, `update stock set quantity = quantity - 1 where item = 'tea'`); err != nil {
				return err
			}
			msg := message.NewMessage(id, []byte(`{"item":"tea"}`))
			outbox.SetKey(msg, "tea")
			return box.Publish(ctx, tx, "orders", msg)
		})
	}
	fmt.Println("first order refused:", order("order-1") != nil)
	fmt.Println("second order refused:", order("order-2") != nil)

	table, err := box.Config().Database.Table(box.DB(), "outbox")
	if err != nil {
		log.Fatal(err)
	}
	var id, topic, payload string
	if err := box.DB().QueryRowContext(ctx, `select message_id, topic, payload from `+table).Scan(&id, &topic, &payload); err != nil {
		log.Fatal(err)
	}
	fmt.Println("owed to the broker:", id, topic, payload)
	// Output:
	// first order refused: false
	// second order refused: true
	// owed to the broker: order-1 orders {"item":"tea"}
}

// One publisher, made at the start, finds each message's transaction in its
// context; without one it refuses.
func ExampleOutbox_ContextPublisher() {
	ctx := context.Background()
	box, remove := openExample(ctx)
	defer remove()
	publisher := box.ContextPublisher()

	publish := func(ctx context.Context, id string) error {
		msg := message.NewMessage(id, nil)
		msg.SetContext(ctx)
		return publisher.Publish("orders", msg)
	}
	fmt.Println("inside:", box.RunInTx(ctx, func(ctx context.Context, _ *sql.Tx) error {
		return publish(ctx, "order-1")
	}))
	fmt.Println("outside:", publish(ctx, "order-2"))
	// Output:
	// inside: <nil>
	// outside: outbox: no transaction; pass one, or put it into the message's context (oncemill.ContextWithTx, msg.SetContext)
}
