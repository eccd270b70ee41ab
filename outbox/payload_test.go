package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// objects is a store of large payloads that takes them in as long as it does not
// fail.
type objects struct {
	payload.Store
	mu   sync.Mutex
	all  map[string][]byte
	fail error
}

func (o *objects) Put(_ context.Context, name string, body []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fail != nil {
		return o.fail
	}
	if o.all == nil {
		o.all = map[string][]byte{}
	}
	o.all[name] = bytes.Clone(body)
	return nil
}

func (o *objects) Get(_ context.Context, name string) (io.ReadCloser, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return io.NopCloser(bytes.NewReader(o.all[name])), nil
}

func newCodec(t *testing.T, cfg payload.Config) *payload.Codec {
	t.Helper()
	codec, err := payload.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return codec
}

func protecting(store payload.Store) payload.Config {
	key := func(b byte) payload.Keys {
		return payload.Keys{Current: "1", Secrets: map[string]oncemill.Secret{"1": oncemill.NewSecret(bytes.Repeat([]byte{b}, 32))}}
	}
	return payload.Config{
		CompressFrom: 1, Encryption: key(1), RequireEncryption: true, Signature: key(2), RequireSignature: true, Store: store, StoreFrom: 500,
	}
}

// wire returns a row as a consumer receives it.
func wire(t *testing.T, row outboxstore.Row) *message.Message {
	t.Helper()
	metadata, err := outboxstore.DecodeMetadata(row.Metadata)
	if err != nil {
		t.Fatal(err)
	}
	return &message.Message{UUID: row.MessageID, Payload: row.Payload, Metadata: metadata}
}

func TestPublish_EncodesACopy(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		codec := newCodec(t, protecting(&objects{}))
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Payload = codec })
		noise := make([]byte, 1000)
		random := rand.NewChaCha8([32]byte{})
		random.Read(noise)
		small, large := newMessage("small", "k"), message.NewMessage("large", noise)
		small.Metadata.Set("name", "OrderPlaced")
		want := []*message.Message{small.Copy(), large.Copy()}

		// The first attempt is undone, its messages are published again.
		attempts := 0
		expectNoError(t, p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			attempts++
			large.SetContext(ctx)
			if err := p.box.Publisher(tx).Publish("orders", small); err != nil {
				return err
			}
			if err := p.box.ContextPublisher().Publish("orders", large); err != nil {
				return err
			}
			if attempts == 1 {
				return &pq.Error{Code: "40001"}
			}
			return nil
		}))
		rows := p.read(t)
		if attempts != 2 || len(rows) != 2 {
			t.Fatalf("%d attempts, %d rows", attempts, len(rows))
		}
		for i, msg := range []*message.Message{small, large} {
			if !msg.Equals(want[i]) {
				t.Errorf("the caller's message became %q %v", msg.Payload, msg.Metadata)
			}
		}
		for _, row := range rows {
			msg := wire(t, row)
			plain, err := codec.Decode(t.Context(), "orders", msg)
			if err != nil {
				t.Fatal(err)
			}
			if row.MessageID == "small" && !plain.Equals(want[0]) || row.MessageID == "large" && !plain.Equals(want[1]) {
				t.Errorf("got %q %v", plain.Payload, plain.Metadata)
			}
			if strings.Contains(msg.Metadata.Get(payload.EncodingMetadata), "claim:") != (row.MessageID == "large") || bytes.Contains(row.Payload, []byte("payload of")) {
				t.Errorf("stored %q %v", row.Payload, msg.Metadata)
			}
			if row.MessageID == "small" && (row.Key != "k" || row.Lane != outbox.Lane("k", "")) {
				t.Errorf("got %+v", row.Ref)
			}
		}
	})
}

func TestPublish_LimitsWhatIsStored(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		even := message.NewMessage("even", make([]byte, 5000))
		noise := message.NewMessage("noise", make([]byte, 1001))
		random := rand.NewChaCha8([32]byte{})
		random.Read(noise.Payload)
		publish := func(msg *message.Message) error {
			return p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
				return p.box.Publisher(tx).Publish("orders", msg)
			})
		}
		expectTooLarge := func(err error) {
			t.Helper()
			if bad := (*outbox.MessageError)(nil); !errors.As(err, &bad) || bad.Field != "payload" {
				t.Errorf("got %v", err)
			}
		}
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.MaxPayload = 1000 })
		expectTooLarge(publish(even))
		p.use(t, p.db, func(cfg *outbox.Config) { cfg.Payload = newCodec(t, payload.Config{CompressFrom: 1}) })
		expectNoError(t, publish(even))
		expectTooLarge(publish(noise))
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Payload = newCodec(t, payload.Config{CompressFrom: 1, Store: &objects{}, StoreFrom: 1000})
		})
		expectNoError(t, publish(noise))
	})
}

// The key is a function of the message that the caller has.
func TestPublish_TakesTheKeyOfThePlainMessage(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		codec := newCodec(t, protecting(&objects{}))
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Payload = codec
			cfg.Key = func(msg *message.Message) string { return string(msg.Payload) }
		})
		p.publish(t, newMessage("a", "not this one"))
		rows := p.read(t)
		if len(rows) != 1 || rows[0].Key != "payload of a" {
			t.Fatalf("got %+v", rows)
		}
		plain, err := codec.Decode(t.Context(), "orders", wire(t, rows[0]))
		if err != nil || plain.Metadata.Get(outbox.KeyMetadata) != "payload of a" {
			t.Errorf("got %v, %v", plain, err)
		}
	})
}

func TestPublish_SendsNothingThatCannotBeEncoded(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		store := &objects{fail: errors.New("outage")}
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Payload = newCodec(t, payload.Config{Store: store, StoreFrom: 1})
		})
		p.inTx(t, func(tx *sql.Tx) {
			p.tap.sent()
			err := p.box.Publisher(tx).Publish("orders", message.NewMessage("empty", nil), newMessage("a", ""))
			expectError(t, err, payload.ErrStore)
			expectError(t, err, store.fail)
			if !strings.Contains(err.Error(), `message 1 (id "a")`) {
				t.Errorf("got %v", err)
			}
			reserved := newMessage("b", "")
			reserved.Metadata.Set(payload.EncodingMetadata, "gzip")
			expectError(t, p.box.Publisher(tx).Publish("orders", reserved), payload.ErrReserved)
			if sent := p.tap.sent(); len(sent) != 0 {
				t.Errorf("sent %s", firstWords(sent))
			}
			store.fail = nil
			// The transaction is still good.
			expectNoError(t, p.box.Publisher(tx).Publish("orders", newMessage("a", "")))
		})
		expectIDs(t, p.read(t), "a")
	})
}

func TestPublish_StoresNothingForWhatCannotBePublished(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		store := &objects{}
		p.use(t, p.db, func(cfg *outbox.Config) {
			cfg.Payload = newCodec(t, payload.Config{Store: store, StoreFrom: 1})
		})
		p.inTx(t, func(tx *sql.Tx) {
			expectError(t, p.box.ContextPublisher().Publish("orders", newMessage("no transaction", "")), outbox.ErrNoTx)
			with := newMessage("with", "")
			with.SetContext(oncemill.ContextWithTx(t.Context(), tx))
			expectError(t, p.box.ContextPublisher().Publish("orders", with, newMessage("without", "")), outbox.ErrNoTx)
			for _, msg := range []*message.Message{nil, newMessage("", ""), newMessage("a", "\x00")} {
				if bad := (*outbox.MessageError)(nil); !errors.As(p.box.Publisher(tx).Publish("orders", msg), &bad) {
					t.Errorf("%v was published", msg)
				}
				// Behind one that is fine, which is not stored either.
				if bad := (*outbox.MessageError)(nil); !errors.As(p.box.ContextPublisher().Publish("orders", with, msg), &bad) {
					t.Errorf("%v was published", msg)
				}
			}
		})
		if names := maps.Keys(store.all); len(store.all) != 0 {
			t.Errorf("stored %v", names)
		}
	})
}
