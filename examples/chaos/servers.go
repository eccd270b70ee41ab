package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// servers is a site on PostgreSQL and RabbitMQ, which others may use at the same time. Its
// schemas, exchange and queues are removed at the end.
type servers struct {
	Postgres, AMQP string // URLs
	Name           string // of the shop's schema and of the exchange
}

// prepareServers creates the schema and the record of the wire. Each part of the shop is a
// process there.
func prepareServers(ctx context.Context, postgres, broker string) (*setup, error) {
	at := &servers{Postgres: postgres, AMQP: broker, Name: "chaos_" + strings.ToLower(rand.Text()[:10])}
	db, err := at.open()
	if err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, "create schema "+pq.QuoteIdentifier(at.Name)); err != nil {
		return nil, errors.Join(fmt.Errorf("create schema: %w", err), db.Close())
	}
	wire, err := newRabbitWire(at)
	if err != nil {
		return nil, errors.Join(err, at.dropSchemas(ctx, db), db.Close())
	}
	return &setup{
		name:    "PostgreSQL and RabbitMQ",
		job:     job{Servers: at},
		pending: "select count(*) from " + pq.QuoteIdentifier(at.database().Schema) + ".outbox",
		wire:    wire,
		processes: []*process{
			{name: roleInventory, roles: []string{roleInventory}, ends: []end{ // the first: its queue has to be there
				{stage: stageConsumer, after: 0.15},
				{stage: stageConsumer, after: 0.30},
				{booked: 0.65},
				{booked: 0.80},
			}},
			{name: roleRelay, roles: []string{roleRelay}, ends: []end{
				{stage: stageRelay, after: 0.10},
				{stage: stageRelay, after: 0.40},
				{taken: 0.85},
			}},
			{name: roleAPI, roles: []string{roleAPI}, ends: []end{{taken: 0.55}}},
		},
		close: func(ctx context.Context) error {
			return errors.Join(wire.close(), at.dropSchemas(ctx, db), db.Close())
		},
	}, nil
}

func (s *servers) dropSchemas(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_, err := db.ExecContext(ctx, "drop schema if exists "+
		pq.QuoteIdentifier(s.Name)+", "+pq.QuoteIdentifier(s.database().Schema)+" cascade")
	if err != nil {
		return fmt.Errorf("drop schemas: %w", err)
	}
	return nil
}

// open returns the database with the shop's schema first in the search path.
func (s *servers) open() (*sql.DB, error) {
	address, err := url.Parse(s.Postgres)
	if err != nil {
		return nil, errors.New("-postgres is not a URL") // the cause would show the password
	}
	query := address.Query()
	query.Set("search_path", s.Name)
	query.Set("binary_parameters", "yes") // a statement with arguments takes one round trip instead of two
	address.RawQuery = query.Encode()
	db, err := sql.Open("postgres", address.String())
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db.SetMaxOpenConns(customersAtOnce)
	db.SetMaxIdleConns(customersAtOnce)
	return db, nil
}

func (s *servers) database() oncemill.Config { return oncemill.Config{Schema: s.Name + "_mill"} }

func (s *servers) topic() string { return s.Name }

func (s *servers) sink(logger *slog.Logger) (relay.Sink, error) {
	return rabbitmq.New(s.queue(), rabbitmq.Config{Logger: logger})
}

func (s *servers) consumer(logger *slog.Logger) (mill.Consumer, error) {
	return mill.Consumer{Subscriber: func(in *inbox.Inbox) (message.Subscriber, error) {
		return inboxrabbitmq.New(s.queue(), inboxrabbitmq.Config{Malformed: in.Refuse, Logger: logger})
	}}, nil
}

// queue is Watermill's configuration of a durable fanout exchange that is named like the
// topic, and of a durable queue for the inventory.
func (s *servers) queue() amqp.Config {
	config := amqp.NewDurablePubSubConfig(s.AMQP, amqp.GenerateQueueNameTopicNameWithSuffix(roleInventory))
	// Only one of several inventories is served at a time, and the next one only after the
	// messages of the last are back in the queue. So effects keep the order of messages when
	// an inventory is killed.
	config.Queue.Arguments = amqp091.Table{"x-single-active-consumer": true}
	return config
}

// rabbitWire reads and writes RabbitMQ with its own client. A queue records every message that
// the inventory gets, and is read at the end.
type rabbitWire struct {
	conn      *amqp091.Connection
	channel   *amqp091.Channel
	exchange  string
	queue     string
	inventory string // the inventory's queue
	copied    int    // messages at the head of the queue that copy has used
}

func newRabbitWire(at *servers) (*rabbitWire, error) {
	conn, err := amqp091.Dial(at.AMQP)
	if err != nil {
		return nil, fmt.Errorf("connect to RabbitMQ: %w", err)
	}
	config := at.queue()
	w := &rabbitWire{conn: conn, exchange: at.topic(), queue: at.topic() + "_record", inventory: config.Queue.GenerateName(at.topic())}
	if err := w.declare(config); err != nil {
		return nil, errors.Join(fmt.Errorf("declare the record: %w", err), conn.Close())
	}
	return w, nil
}

func (w *rabbitWire) declare(config amqp.Config) (err error) {
	if w.channel, err = w.conn.Channel(); err != nil {
		return err
	}
	if err := w.channel.Confirm(false); err != nil {
		return err
	}
	if err := config.TopologyBuilder.ExchangeDeclare(w.channel, w.exchange, config); err != nil {
		return err
	}
	if _, err := w.channel.QueueDeclare(w.queue, true, false, false, false, nil); err != nil {
		return err
	}
	return w.channel.QueueBind(w.queue, "", w.exchange, false, nil)
}

// close removes what the run declared, the inventory's queue too.
func (w *rabbitWire) close() error {
	_, err1 := w.channel.QueueDelete(w.queue, false, false, false)
	_, err2 := w.channel.QueueDelete(w.inventory, false, false, false)
	err3 := w.channel.ExchangeDelete(w.exchange, false, false)
	return errors.Join(err1, err2, err3, w.conn.Close())
}

func (w *rabbitWire) copy(ctx context.Context, n int) ([]string, error) {
	var ids []string
	var last amqp091.Delivery
	for i := range w.copied + n {
		delivery, ok, err := w.channel.Get(w.queue, false)
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		last = delivery
		if i < w.copied {
			continue
		}
		if err := w.publish(ctx, delivery); err != nil {
			return nil, err
		}
		ids = append(ids, delivery.MessageId)
	}
	w.copied += len(ids)
	if last.DeliveryTag == 0 {
		return nil, nil
	}
	return ids, last.Nack(true, true) // all return to their places
}

func (w *rabbitWire) publish(ctx context.Context, d amqp091.Delivery) error {
	confirm, err := w.channel.PublishWithDeferredConfirmWithContext(ctx, w.exchange, d.RoutingKey, true, false, amqp091.Publishing{
		Headers:      d.Headers,
		ContentType:  d.ContentType,
		DeliveryMode: d.DeliveryMode,
		MessageId:    d.MessageId,
		Timestamp:    d.Timestamp,
		Type:         d.Type,
		Body:         d.Body,
	})
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	if err == nil && !acked {
		err = errors.New("RabbitMQ refused a copy")
	}
	return err
}

// waiting does not count the message that the inventory is handling, as RabbitMQ does not.
func (w *rabbitWire) waiting(context.Context) (int, error) {
	queue, err := w.channel.QueueDeclarePassive(w.inventory, true, false, false, false, nil)
	return queue.Messages, err
}

// read empties the queue.
func (w *rabbitWire) read(ctx context.Context) ([]delivery, error) {
	queue, err := w.channel.QueueDeclarePassive(w.queue, true, false, false, false, nil)
	if err != nil {
		return nil, err
	}
	deliveries, err := w.channel.ConsumeWithContext(ctx, w.queue, "", true, true, false, false, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	read := make([]delivery, 0, queue.Messages)
	for len(read) < queue.Messages {
		select {
		case d, ok := <-deliveries:
			if !ok {
				return nil, errors.New("RabbitMQ closed the channel")
			}
			read = append(read, delivery{messageID: d.MessageId, payload: d.Body})
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d messages read: %w", len(read), queue.Messages, ctx.Err())
		}
	}
	return read, nil
}
