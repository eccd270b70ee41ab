// Command readme is the program of the README: a shop on PostgreSQL and RabbitMQ whose
// orders take stock, and whose reservations are confirmed by mail.
//
//	go run ./readme -database postgres://localhost/shop -broker amqp://localhost
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/lib/pq" // the driver "postgres"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	queues "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

//snippet:serve
func serve(ctx context.Context, db *sql.DB, broker, address string) error {
	sink, err := rabbitmq.New(amqp.NewDurablePubSubConfig(broker, nil), rabbitmq.Config{})
	if err != nil {
		return err
	}
	m, err := mill.New(db, mill.Config{
		Idempotency: &idempotency.Config{Scope: idempotency.SingleTenant()},
		Outbox:      &outbox.Config{},
		Sink:        sink,
		Consumers: []mill.Consumer{
			{Name: "stock", Topic: "orders", Subscriber: queues.Queue(broker, "stock", queues.Config{}), Handler: reserve, Produces: "reservations"},
			{Name: "mail", Topic: "reservations", Subscriber: queues.Queue(broker, "mail", queues.Config{}), Handler: confirm},
		},
	})
	if err != nil {
		return err
	}
	http.Handle("POST /orders", m.Idempotency().TxMiddleware(placeOrder(m.Outbox())))
	return m.Run(ctx, m.Serve(&http.Server{Addr: address, ReadHeaderTimeout: 10 * time.Second}))
}

// placeOrder commits the idempotency key, the order and its message in one transaction.
// A client that sends the request again with its Idempotency-Key gets the first answer.
func placeOrder(box *outbox.Outbox) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		id, item := watermill.NewUUID(), r.FormValue("item")
		_, err := tx.ExecContext(r.Context(), `insert into orders (id, item) values ($1, $2)`, id, item)
		if err == nil {
			err = box.Publish(r.Context(), tx, "orders", message.NewMessage(id, []byte(item)))
		}
		if err != nil {
			http.Error(w, "please try again", http.StatusServiceUnavailable) // nothing is stored
			return
		}
		w.WriteHeader(http.StatusCreated)
	}
}

// reserve commits the message's id, the new stock and the message that it returns in one
// transaction. However often the order is delivered, the stock shrinks by one.
func reserve(order *message.Message) ([]*message.Message, error) {
	tx, _ := inbox.TxFromContext(order.Context())
	_, err := tx.ExecContext(order.Context(), `update stock set units = units - 1 where item = $1`, string(order.Payload))
	return []*message.Message{message.NewMessage(watermill.NewUUID(), order.Payload)}, err
}

//snippet:end

// confirm stands for sending a mail: it stores what it would send.
func confirm(reservation *message.Message) ([]*message.Message, error) {
	tx, _ := inbox.TxFromContext(reservation.Context())
	_, err := tx.ExecContext(reservation.Context(), `insert into mails (item) values ($1)`, string(reservation.Payload))
	return nil, err
}

// tables of the shop; oncemill creates its tables in another schema.
const tables = `
create table if not exists orders (id text primary key, item text not null);
create table if not exists stock (item text primary key, units integer not null);
create table if not exists mails (item text not null);
insert into stock values ('tea', 10) on conflict do nothing`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	database := flag.String("database", "postgres://localhost/shop?sslmode=disable", "URL of the database")
	broker := flag.String("broker", "amqp://localhost", "URL of RabbitMQ")
	address := flag.String("listen", "localhost:8080", "address of the API")
	flag.Parse()
	err := run(ctx, *database, *broker, *address)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "readme:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, database, broker, address string) (err error) {
	db, err := sql.Open("postgres", database)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.SetMaxIdleConns(8)
	if _, err := db.ExecContext(ctx, tables); err != nil {
		return fmt.Errorf("create the shop's tables: %w", err)
	}
	return serve(ctx, db, broker, address)
}
