// Command readme is the program whose middle part is the README's example. It
// runs on a SQLite file and Watermill's in-memory broker.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"golang.org/x/sync/errgroup"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

//snippet:work
func work(ctx context.Context, db *sql.DB, broker Broker, router *message.Router) error {
	box, err1 := outbox.New(db, outbox.Config{})
	worker, err2 := relay.New(box, relay.FromPublisher(broker), relay.Config{}) // or relay/rabbitmq: pipelined
	in, err3 := inbox.New(db, inbox.Config{Consumer: "stock"})
	err4 := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}

	// However often the message comes, the stock shrinks by one.
	router.AddMiddleware(in.Middleware)
	router.AddConsumerHandler("stock", "orders", broker, func(msg *message.Message) error {
		tx, _ := inbox.TxFromContext(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `update stock set units = units - 1 where item = ?`, string(msg.Payload))
		return err
	})
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return worker.Run(ctx) })
	group.Go(func() error { return router.Run(ctx) })
	group.Go(func() error { return in.Run(ctx) }) // removes old ids
	// The message exists if and only if the order does.
	group.Go(func() error {
		return box.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `insert into orders values ('order-1', 'tea')`); err != nil {
				return err
			}
			return box.Publish(ctx, tx, "orders", message.NewMessage(watermill.NewUUID(), []byte("tea")))
		})
	})
	return group.Wait()
}

//snippet:end

// Broker is any Watermill Pub/Sub.
type Broker interface {
	message.Publisher
	message.Subscriber
}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "readme:", err)
		os.Exit(1)
	}
}

// run sends the message a second time, by the broker's fault so to say, waits for
// both to be handled, and shows the stock.
func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "oncemill-readme-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	_, err = db.ExecContext(ctx, `
create table orders (id text primary key, item text not null);
create table stock (item text primary key, units integer not null);
insert into stock values ('tea', 10)`)
	if err != nil {
		return err
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	broker := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	handled := 0
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err != nil {
				return nil, err
			}
			if handled++; handled == 1 {
				return produced, broker.Publish("orders", msg.Copy())
			}
			stop()
			return produced, nil
		}
	})
	if err := work(ctx, db, broker, router); err != nil {
		return err
	}
	var left int
	if err := db.QueryRowContext(context.WithoutCancel(ctx), `select units from stock`).Scan(&left); err != nil {
		return err
	}
	_, err = fmt.Printf("the message came %d times, %d of 10 teas are left\n", handled, left)
	return err
}
