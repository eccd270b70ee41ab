// Command quickstart is a whole service in one process: an HTTP API, a SQLite file, an
// embedded broker and a consumer. Start it and run the command that it prints:
//
//	go run ./quickstart
//
// Read it from top to bottom: it follows an order through the service.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/internal/broker"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const tables = `
create table if not exists orders (id text primary key, item text not null) strict;
create table if not exists sales (item text primary key, sold integer not null) strict`

const welcome = `shop started. Order some tea:

    curl -i http://%s/orders -H 'Idempotency-Key: "order-1"' -d item=tea

Run the command again: you get the same answer, and nothing is sold twice.
Another key is another order. Stop with Ctrl-C or kill -9, and start again: nothing is lost.

`

// placeOrder handles a request. The idempotency key, the order, its message and the answer
// commit in one transaction.
func placeOrder(box *outbox.Outbox) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ctx := r.Context()
		tx, _ := idempotency.TxFromContext(ctx)
		id, item := idempotency.DeriveUUID(ctx, "order"), r.FormValue("item")
		_, err := tx.ExecContext(ctx, `insert into orders (id, item) values (?, ?)`, id, item)
		if err == nil {
			err = box.Publish(ctx, tx, "orders", message.NewMessage(id, []byte(item)))
		}
		if err != nil {
			http.Error(w, "please try again", http.StatusServiceUnavailable) // nothing is stored
			return
		}
		log.Printf("API:      order %s of %s stored with its message", id, item)
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprintln(w, "order", id) // the answer is stored even if the client has gone
	}
}

// logRelayed logs each message that the relay publishes.
func logRelayed(msg *message.Message) {
	log.Printf("relay:    message %s published", msg.UUID)
}

// sell handles a message. The message's id and the sale commit in one transaction: however
// often the broker delivers the message, the item is sold once.
func sell(msg *message.Message) ([]*message.Message, error) {
	ctx, item := msg.Context(), string(msg.Payload)
	tx, _ := inbox.TxFromContext(ctx)
	var sold int
	err := tx.QueryRowContext(ctx, `
insert into sales (item, sold) values (?, 1)
on conflict (item) do update set sold = sold + 1
returning sold`, item).Scan(&sold)
	if err != nil {
		return nil, err // it is delivered again
	}
	log.Printf("consumer: message %s handled, %d of %s sold", msg.UUID, sold, item)
	return nil, nil
}

// run assembles the service and runs it until ctx ends.
func run(ctx context.Context, dir, address string) (err error) {
	jetstream, err := broker.Start(filepath.Join(dir, "jetstream"))
	if err != nil {
		return err
	}
	defer jetstream.WaitForShutdown()
	defer jetstream.Shutdown()
	publisher, err := broker.NewPublisher(jetstream.ClientURL())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, publisher.Close()) }()
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.SetMaxIdleConns(8) // readers work beside the one writer
	if _, err := db.ExecContext(ctx, tables); err != nil {
		return fmt.Errorf("create the shop's tables: %w", err)
	}

	logged, err := message.MessageTransformPublisherDecorator(logRelayed)(publisher)
	if err != nil {
		return err
	}
	m, err := mill.New(db, mill.Config{
		Idempotency: &idempotency.Config{Scope: idempotency.SingleTenant()},
		Outbox:      &outbox.Config{},
		Sink:        relay.FromPublisher(logged),
		Relay:       relay.Config{Name: "quickstart", UniqueName: true}, // continues at once after kill -9
		Consumers: []mill.Consumer{{
			Name: "sales", Topic: "orders", Handler: sell, Replays: publisher,
			Subscriber: func(*inbox.Inbox) (message.Subscriber, error) {
				return broker.NewSubscriber(jetstream.ClientURL(), "sales")
			},
		}},
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", m.Idempotency().TxMiddleware(placeOrder(m.Outbox())))
	log.Printf(welcome, address)
	return m.Run(ctx, m.Serve(&http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: 10 * time.Second}))
}

func main() {
	dir := flag.String("dir", filepath.Join(os.TempDir(), "oncemill-quickstart"), "directory of the database and the broker")
	address := flag.String("listen", "localhost:8080", "address of the API")
	flag.Parse()
	log.SetFlags(log.Ltime)
	slog.SetLogLoggerLevel(slog.LevelWarn) // what the parts log: warnings only
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *dir, *address)
	stop()
	if err != nil {
		log.Fatal("quickstart: ", err)
	}
}
