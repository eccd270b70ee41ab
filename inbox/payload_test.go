package inbox_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

func newCodec(t *testing.T, change func(*payload.Config)) *payload.Codec {
	t.Helper()
	key := func(b byte) payload.Keys {
		return payload.Keys{Current: "1", Secrets: map[string]oncemill.Secret{"1": oncemill.NewSecret(bytes.Repeat([]byte{b}, 32))}}
	}
	cfg := payload.Config{Encryption: key(1), RequireEncryption: true, Signature: key(2), RequireSignature: true}
	if change != nil {
		change(&cfg)
	}
	codec, err := payload.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return codec
}

// encoded is what a producer sends to topic, as the router hands it over.
func encoded(t *testing.T, codec *payload.Codec, topic, id, body string) *message.Message {
	t.Helper()
	plain := message.NewMessage(id, []byte(body))
	plain.Metadata.Set("name", "OrderPlaced")
	msg, err := codec.Encode(t.Context(), topic, "", plain)
	if err != nil {
		t.Fatal(err)
	}
	msg.SetContext(routed(t, id, "results").Context())
	return msg
}

func TestInbox_GivesHandlersThePlainPayload(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		codec := newCodec(t, nil)
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Payload = codec })
		msg := encoded(t, codec, "orders", "a", "tea")
		asCame := msg.Copy()
		failure := errors.New("out of stock")
		for _, want := range []error{failure, nil} { // a retry outside of the inbox
			err := deliverMessage(t, in, msg, func(m *message.Message) ([]*message.Message, error) {
				if string(m.Payload) != "tea" || !maps.Equal(m.Metadata, message.Metadata{"name": "OrderPlaced"}) {
					t.Errorf("the handler got %q %v", m.Payload, m.Metadata)
				}
				m.Metadata.Set("left", "by the handler")
				return nil, errors.Join(addEffect(m), want)
			})
			expectError(t, err, want)
			if !msg.Equals(asCame) {
				t.Errorf("the message is left as %q %v", msg.Payload, msg.Metadata)
			}
		}
		expectNoError(t, deliverMessage(t, in, msg, effect))
		p.expect(t, 1, 1, 0)
	})
}

// A message that is refused leaves no id: the genuine one of that id is handled
// whether it comes later or has come before.
func TestInbox_RefusedPayloadTakesNoIDAndSendsNothing(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		codec := newCodec(t, nil)
		counters := &recordingProvider{counts: map[string]int64{}}
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Payload, cfg.MeterProvider = codec, counters })
		never := func(*message.Message) ([]*message.Message, error) {
			t.Error("the handler ran")
			return nil, nil
		}
		forged := message.NewMessageWithContext(t.Context(), "a", []byte("gold"))
		changed := encoded(t, codec, "orders", "a", "tea")
		changed.Payload = encoded(t, codec, "orders", "b", "gold").Payload
		newer := newCodec(t, func(cfg *payload.Config) {
			cfg.Signature.Current = "2"
			cfg.Signature.Secrets["2"] = oncemill.NewSecret(bytes.Repeat([]byte{3}, 32))
		})
		refuse := func() {
			for want, msg := range map[error]*message.Message{
				payload.ErrUnsigned: forged, payload.ErrSignature: changed,
				payload.ErrTopic:      encoded(t, codec, "refunds", "a", "tea"),
				payload.ErrUnknownKey: encoded(t, newer, "orders", "a", "tea"),
			} {
				p.tap.sent()
				err := deliverMessage(t, in, msg, never)
				expectError(t, err, want)
				var bad *payload.DecodeError
				if !errors.As(err, &bad) || bad.MessageID != "a" || bad.Permanent() == errors.Is(want, payload.ErrUnknownKey) {
					t.Errorf("got %v", err)
				}
				if sent := p.tap.sent(); len(sent) != 0 {
					t.Errorf("statements sent: %v", sent)
				}
			}
		}
		refuse()
		expectNoError(t, deliverMessage(t, in, encoded(t, codec, "orders", "a", "tea"), effect))
		refuse()
		p.expect(t, 1, 1, 0)
		if n := counters.counts[`oncemill.inbox.failed error.type=payload messaging.consumer.group.name=stock messaging.destination.name=orders`]; n != 6 {
			t.Errorf("counted %v", counters.counts)
		}
	})
}

// connections is a store that looks how many connections are in use while it is
// asked.
type connections struct {
	p     *testDB
	all   map[string][]byte
	inUse []int
}

func (c *connections) Put(_ context.Context, name string, body []byte) error {
	c.all[name] = bytes.Clone(body)
	return nil
}

func (c *connections) Get(_ context.Context, name string) (io.ReadCloser, error) {
	c.inUse = append(c.inUse, c.p.db.Stats().InUse)
	return io.NopCloser(bytes.NewReader(c.all[name])), nil
}

func TestInbox_HoldsNoTransactionOverTheStore(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		store := &connections{p: p, all: map[string][]byte{}}
		codec := newCodec(t, func(cfg *payload.Config) { cfg.Store, cfg.StoreFrom = store, 1 })
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Payload = codec })
		err := deliverMessage(t, in, encoded(t, codec, "orders", "a", "tea"), func(m *message.Message) ([]*message.Message, error) {
			if string(m.Payload) != "tea" || p.db.Stats().InUse != 1 {
				t.Errorf("got %q with %d connections in use", m.Payload, p.db.Stats().InUse)
			}
			return nil, addEffect(m)
		})
		expectNoError(t, err)
		if len(store.inUse) != 1 || store.inUse[0] != 0 {
			t.Errorf("connections in use while the store was asked: %v", store.inUse)
		}
		p.expect(t, 1, 1, 0)
	})
}

// What a handler returns, also the very message it got, is encoded for its new
// topic by the codec of the outbox.
func TestInbox_EncodesWhatHandlersReturn(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		codec := newCodec(t, nil)
		box, err := outbox.New(p.db, outbox.Config{Database: p.cfg, Payload: codec})
		if err != nil {
			t.Fatal(err)
		}
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Outbox, cfg.Payload = box, codec })
		expectNoError(t, deliverMessage(t, in, encoded(t, codec, "orders", "a", "tea"), func(m *message.Message) ([]*message.Message, error) {
			return []*message.Message{m}, nil
		}))
		lanes := make([]int, outbox.Lanes)
		for i := range lanes {
			lanes[i] = i
		}
		rows, err := outboxqueue.Of(box).Read(t.Context(), outboxstore.ReadRequest{Lanes: lanes, Rows: 10, Bytes: 1 << 20})
		if err != nil || len(rows) != 1 {
			t.Fatalf("%d rows, %v", len(rows), err)
		}
		metadata, err := outboxstore.DecodeMetadata(rows[0].Metadata)
		if err != nil {
			t.Fatal(err)
		}
		sent := &message.Message{UUID: rows[0].MessageID, Payload: rows[0].Payload, Metadata: metadata}
		plain, err := codec.Decode(t.Context(), "results", sent)
		if err != nil || string(plain.Payload) != "tea" || bytes.Contains(sent.Payload, []byte("tea")) {
			t.Errorf("got %v, %v", plain, err)
		}
	})
}
