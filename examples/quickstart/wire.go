package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/oncemill/oncemill/examples/internal/demo"
)

// idHeader is where Watermill's NATS marshaler keeps a message's id.
const idHeader = "_watermill_message_uuid"

// wire is the demo's own view of the broker, by the plain NATS client.
type wire struct {
	conn   *nats.Conn
	js     jetstream.JetStream
	copied uint64 // sequence of the last message that Copy took
}

func newWire(url string) (*wire, error) {
	conn, err := nats.Connect(url)
	if err != nil {
		return nil, fmt.Errorf("connect to broker: %w", err)
	}
	js, err := jetstream.New(conn)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("connect to broker: %w", err)
	}
	return &wire{conn: conn, js: js}, nil
}

func (w *wire) close() { w.conn.Close() }

// Copy implements demo.Broker.
func (w *wire) Copy(ctx context.Context, n int) ([]string, error) {
	stream, err := w.js.Stream(ctx, topic)
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

// Waiting implements demo.Broker.
func (w *wire) Waiting(ctx context.Context) (int, error) {
	consumer, err := w.js.PushConsumer(ctx, topic, "inventory")
	if err != nil {
		return 0, err
	}
	info := consumer.CachedInfo()
	return int(info.NumPending) + info.NumAckPending, nil
}

// Wire implements demo.Broker. It refuses a stream with ids for JetStream's own
// deduplication, for then the demo would prove nothing.
func (w *wire) Wire(ctx context.Context) ([]demo.Delivery, error) {
	stream, err := w.js.Stream(ctx, topic)
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
	var read []demo.Delivery
	for sequence := uint64(0); sequence < last; {
		msg, err := messages.Next(jetstream.NextMaxWait(10 * time.Second))
		if err != nil {
			return nil, err
		}
		if msg.Headers().Get(jetstream.MsgIDHeader) != "" {
			return nil, errors.New("a message carries an id for JetStream's deduplication, which has to be off")
		}
		metadata, err := msg.Metadata()
		if err != nil {
			return nil, err
		}
		sequence = metadata.Sequence.Stream
		read = append(read, demo.Delivery{MessageID: msg.Headers().Get(idHeader), Payload: msg.Data()})
	}
	return read, nil
}
