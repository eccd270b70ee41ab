package payload_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
	"github.com/oncemill/oncemill/relay"
)

//snippet:codec
func newOrdersCodec(encryptionKey, signatureKey []byte, bucket payload.Store) (*payload.Codec, error) {
	return payload.New(payload.Config{
		CompressFrom: 1024,
		Encryption: payload.Keys{
			Current: "2026-11",
			Secrets: map[string]oncemill.Secret{"2026-11": oncemill.NewSecret(encryptionKey)},
		},
		RequireEncryption: true,
		Store:             bucket,
		Signature: payload.Keys{
			Current: "orders-1",
			Secrets: map[string]oncemill.Secret{"orders-1": oncemill.NewSecret(signatureKey)},
		},
		RequireSignature: true,
		SignedMetadata:   []string{"name"},
	})
}

//snippet:end

//snippet:store
type bucket struct{ dir string } // object storage takes two calls of its client

func (b bucket) Put(_ context.Context, name string, body []byte) error {
	return os.WriteFile(filepath.Join(b.dir, name), body, 0o600)
}

func (b bucket) Get(_ context.Context, name string) (io.ReadCloser, error) {
	return os.Open(filepath.Join(b.dir, name))
}

//snippet:end

// A large order with a card number is encrypted, stored and signed. The message contains only
// a reference; the handler gets the plain order.
func Example() {
	dir, err := os.MkdirTemp("", "oncemill")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary file
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // read to its end
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations); err != nil {
		log.Fatal(err)
	}
	// Real ones come from crypto/rand and a secret manager.
	codec, err := newOrdersCodec(bytes.Repeat([]byte("e"), 32), bytes.Repeat([]byte("s"), 32), bucket{dir})
	if err != nil {
		log.Fatal(err)
	}

	//snippet:use
	box, err := outbox.New(db, outbox.Config{Payload: codec})
	if err != nil {
		log.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "billing", Outbox: box, Payload: codec})
	if err != nil {
		log.Fatal(err)
	}
	//snippet:end

	// GoChannel takes the place of RabbitMQ.
	broker := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
	worker, err := relay.New(box, relay.FromPublisher(broker), relay.Config{})
	if err != nil {
		log.Fatal(err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			fmt.Printf("on the wire: %d bytes\n", len(msg.Payload))
			produced, err := h(msg)
			if err == nil {
				stop() // committed
			}
			return produced, err
		}
	})
	router.AddConsumerHandler("billing", "orders", broker, func(msg *message.Message) error {
		fmt.Printf("handled: %d bytes, %s\n", len(msg.Payload), msg.Payload[:20])
		return nil
	}).AddMiddleware(in.Middleware)

	scan := make([]byte, 300_000) // of a signature, say: it does not compress
	rand.NewChaCha8([32]byte{}).Read(scan)
	order := message.NewMessage("order-1", append([]byte(`{"card":"4000 0000"}`+"\n"), scan...))
	err = box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error {
		return box.Publisher(tx).Publish("orders", order)
	})
	if err != nil {
		log.Fatal(err)
	}
	stopped := make(chan error)
	go func() { stopped <- router.Run(ctx) }()
	if err := worker.Run(ctx); err != nil {
		log.Fatal(err)
	}
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}
	// Output:
	// on the wire: 0 bytes
	// handled: 300021 bytes, {"card":"4000 0000"}
}
