package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/examples/internal/broker"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/relay"
)

// embedded is a site that needs no server: a SQLite file, and a NATS JetStream server in
// the parent.
type embedded struct {
	Path   string // of the SQLite file
	Broker string // URL
}

// prepareEmbedded starts the broker. The shop is one process there.
func prepareEmbedded(_ context.Context, dir string) (*setup, error) {
	server, err := broker.Start(filepath.Join(dir, "jetstream"))
	if err != nil {
		return nil, err
	}
	stop := func() { server.Shutdown(); server.WaitForShutdown() }
	conn, err := nats.Connect(server.ClientURL())
	if err != nil {
		stop()
		return nil, fmt.Errorf("connect to broker: %w", err)
	}
	js, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		stop()
		return nil, fmt.Errorf("connect to broker: %w", err)
	}
	at := &embedded{Path: filepath.Join(dir, "shop.db"), Broker: server.ClientURL()}
	return &setup{
		name:    "SQLite and NATS JetStream",
		job:     job{Embedded: at},
		pending: "select count(*) from oncemill_outbox",
		wire:    &natsWire{js: js, topic: at.topic()},
		processes: []*process{{
			name:  "service",
			roles: []string{roleAPI, roleRelay, roleInventory},
			// The order matters: in each life enough is left to reach the stage, however fast
			// the inventory is.
			ends: []end{
				{stage: stageRelay, after: 0.10},
				{stage: stageRelay, after: 0.15},
				{stage: stageRelay, after: 0.20},
				{stage: stageConsumer, after: 0.05},
				{stage: stageConsumer, after: 0.10},
				{stage: stageConsumer, after: 0.10},
				{booked: 0.70},
				{booked: 0.90},
			},
		}},
		close: func(context.Context) error { conn.Close(); stop(); return nil },
	}, nil
}

func (e *embedded) open() (*sql.DB, error) {
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(e.Path))
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	db.SetMaxIdleConns(8) // readers work beside the one writer
	return db, nil
}

func (*embedded) database() oncemill.Config { return oncemill.Config{} }

func (*embedded) topic() string { return "orders" }

func (e *embedded) sink(*slog.Logger) (relay.Sink, error) {
	publisher, err := broker.NewPublisher(e.Broker)
	if err != nil {
		return nil, err
	}
	return relay.FromPublisher(publisher), nil
}

func (e *embedded) consumer(*slog.Logger) (mill.Consumer, error) {
	publisher, err := broker.NewPublisher(e.Broker)
	return mill.Consumer{
		Subscriber: func(*inbox.Inbox) (message.Subscriber, error) { return broker.NewSubscriber(e.Broker, roleInventory) },
		Replays:    publisher,
	}, err
}

// idHeader is the header in which Watermill's NATS marshaler puts a message's id.
const idHeader = "_watermill_message_uuid"

// natsWire reads and writes JetStream with its own client.
type natsWire struct {
	js     jetstream.JetStream
	topic  string // the stream, and its only subject
	copied uint64 // sequence of the last message that copy took
}

func (w *natsWire) copy(ctx context.Context, n int) ([]string, error) {
	stream, err := w.js.Stream(ctx, w.topic)
	if err != nil {
		return nil, err
	}
	var ids []string
	for last := stream.CachedInfo().State.LastSeq; n > 0 && w.copied < last; n-- {
		w.copied++
		msg, err := stream.GetMsg(ctx, w.copied)
		if err != nil {
			return nil, err
		}
		_, err = w.js.PublishMsg(ctx, &nats.Msg{Subject: msg.Subject, Header: msg.Header, Data: msg.Data})
		if err != nil {
			return nil, err
		}
		ids = append(ids, msg.Header.Get(idHeader))
	}
	return ids, nil
}

func (w *natsWire) waiting(ctx context.Context) (int, error) {
	consumer, err := w.js.PushConsumer(ctx, w.topic, roleInventory)
	if err != nil {
		return 0, err
	}
	info := consumer.CachedInfo()
	return int(info.NumPending) + info.NumAckPending, nil
}

// read refuses a stream with ids for JetStream's deduplication, with which the run would prove
// nothing.
func (w *natsWire) read(ctx context.Context) ([]delivery, error) {
	stream, err := w.js.Stream(ctx, w.topic)
	if err != nil {
		return nil, err
	}
	last := stream.CachedInfo().State.LastSeq
	reader, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	messages, err := reader.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	var read []delivery
	for sequence := uint64(0); sequence < last; {
		msg, err := messages.Next(jetstream.NextMaxWait(10 * time.Second))
		if err != nil {
			return nil, err
		}
		if msg.Headers().Get(jetstream.MsgIDHeader) != "" {
			return nil, errors.New("a message has an id for JetStream's deduplication, which must be off")
		}
		metadata, err := msg.Metadata()
		if err != nil {
			return nil, err
		}
		sequence = metadata.Sequence.Stream
		read = append(read, delivery{messageID: msg.Headers().Get(idHeader), payload: msg.Data()})
	}
	return read, nil
}
