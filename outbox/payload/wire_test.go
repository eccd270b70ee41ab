package payload_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// marker is in every payload and must not be on the wire.
const marker = "canary-canary-canary"

// deliveries records the broker's deliveries outside of the inbox, and acknowledges messages
// that are refused permanently.
type deliveries struct {
	mu      sync.Mutex
	wire    []*message.Message
	refused []error
}

func (d *deliveries) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		d.mu.Lock()
		d.wire = append(d.wire, msg.Copy())
		d.mu.Unlock()
		produced, err := h(msg)
		var bad *payload.DecodeError
		if errors.As(err, &bad) && bad.Permanent() {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.refused = append(d.refused, err)
			return nil, nil
		}
		return produced, err
	}
}

func (d *deliveries) count() (wire, refused int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.wire), len(d.refused)
}

// The complete path: transactions on PostgreSQL, some of them rolled back, the relay, RabbitMQ,
// the stock subscriber and an inbox on PostgreSQL. Nothing is readable on the wire, handlers
// get the original payloads, and forged messages have no effects.
func TestCodec_FromTransactionToEffect(t *testing.T) {
	t.Parallel()
	pg, uri, store := testserver.Postgres(t), testserver.RabbitMQ(t), &objects{}
	quiet := slog.New(slog.DiscardHandler)
	cfg := everything(store)
	cfg.CompressFrom, cfg.StoreFrom = 500, 20_000
	codec := newCodec(t, cfg)
	box, err1 := outbox.New(pg.DB, outbox.Config{Database: pg.Config, Payload: codec, MaxPayload: 30_000, Logger: quiet})
	in, err2 := inbox.New(pg.DB, inbox.Config{Consumer: "stock", Database: pg.Config, Payload: codec, Logger: quiet})
	sink, err3 := rabbitmq.New(amqp.NewDurableQueueConfig(uri), rabbitmq.Config{Logger: quiet})
	worker, err4 := relay.New(box, sink, relay.Config{Logger: quiet})
	subscription := amqp.NewDurableQueueConfig(uri)
	subscription.Marshaler = inboxrabbitmq.Marshaler{}
	subscriber, err5 := amqp.NewSubscriber(subscription, watermill.NopLogger{})
	err6 := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations)
	_, err7 := pg.DB.ExecContext(t.Context(), `create table effects (message_id text, digest text)`)
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7); err != nil {
		t.Fatal(err)
	}

	seen := &deliveries{}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("stock", "orders", subscriber, func(msg *message.Message) error {
		tx, _ := inbox.TxFromContext(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `insert into effects values ($1, $2)`, msg.UUID, digest(msg))
		return err
	}).AddMiddleware(seen.middleware, in.Middleware)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return router.Run(ctx) })
	group.Go(func() error { return worker.Run(ctx) })
	<-router.Running() // the queue is there

	const orders, forgeries = 60, 3
	want := commitOrders(t, box, orders)
	forge(t, uri, forgeries)
	awaited := func() bool {
		wire, refused := seen.count()
		return wire >= orders+forgeries && refused >= forgeries && count(t, pg.DB) >= orders
	}
	limited, cancel := context.WithTimeout(ctx, testserver.MaxWait)
	if !testserver.Poll(limited, awaited) {
		wire, refused := seen.count()
		t.Errorf("in the end %d deliveries, %d of them refused, %d effects", wire, refused, count(t, pg.DB))
	}
	cancel()
	stop()
	if err := errors.Join(group.Wait(), subscriber.Close()); err != nil {
		t.Error(err)
	}

	for id, want := range want {
		var n int
		if err := pg.DB.QueryRowContext(t.Context(), `select count(*) from effects where message_id = $1 and digest = $2`, id, want).Scan(&n); err != nil || n != 1 {
			t.Errorf("%s: %d effects of the right payload, %v", id, n, err)
		}
	}
	if n := count(t, pg.DB); n != orders {
		t.Errorf("%d effects of %d orders", n, orders)
	}
	for _, err := range seen.refused {
		if !errors.Is(err, payload.ErrUnsigned) && !errors.Is(err, payload.ErrSignature) {
			t.Errorf("refused for %v", err)
		}
	}
	claims := map[string]bool{}
	for _, msg := range seen.wire {
		if strings.HasPrefix(msg.UUID, "order-") && bytes.Contains(msg.Payload, []byte(marker)) {
			t.Errorf("%s is readable on the wire", msg.UUID)
		}
		if strings.Contains(msg.Metadata.Get(payload.EncodingMetadata), "claim:") {
			claims[msg.UUID] = true
		}
	}
	// A third of the orders are large. The rolled back ones have left orphans.
	if names := store.names(); len(claims) != orders/3 || len(names) != 2*orders/3 {
		t.Errorf("%d claims, %d objects", len(claims), len(names))
	}
}

// commitOrders publishes n orders of all sizes, and of each a twin that is rolled
// back, by either kind of publisher. It returns the digests of what was committed.
func commitOrders(t *testing.T, box *outbox.Outbox, n int) map[string]string {
	t.Helper()
	want := map[string]string{}
	undo := errors.New("undo")
	random := rand.NewChaCha8([32]byte{})
	for i := range n {
		noise := make([]byte, []int{50, 2000, 25_000}[i%3])
		random.Read(noise)
		for _, end := range []error{undo, nil} {
			msg := message.NewMessage(fmt.Sprintf("order-%d", i), append([]byte(marker), noise...))
			if i%2 == 0 {
				msg.Payload = append(msg.Payload, bytes.Repeat([]byte(marker), i)...)
			}
			msg.Metadata.Set("name", "OrderPlaced")
			outbox.SetKey(msg, fmt.Sprintf("customer-%d", i%7))
			err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				publisher := box.Publisher(tx)
				if i%4 == 0 {
					publisher = box.ContextPublisher()
				}
				msg.SetContext(ctx)
				return errors.Join(publisher.Publish("orders", msg), end)
			})
			if !errors.Is(err, end) {
				t.Fatal(err)
			}
			want[msg.UUID] = digest(msg)
		}
	}
	return want
}

// digest is of everything that a handler gets.
func digest(msg *message.Message) string {
	h := sha256.New()
	for _, part := range []string{msg.UUID, msg.Metadata.Get("name"), msg.Metadata.Get(outbox.KeyMetadata), string(msg.Payload)} {
		fmt.Fprintf(h, "%d %s", len(part), part)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// forge puts n messages of a stranger into the queue, some of which look almost
// like ours.
func forge(t *testing.T, uri string, n int) {
	t.Helper()
	conn, err := amqp091.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := channel.Confirm(false); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		headers := amqp091.Table{payload.TopicMetadata: "orders", "name": "OrderPlaced"}
		if i%2 == 1 {
			headers[payload.EncodingMetadata] = "aes-256-gcm:enc-1"
			headers[payload.SignatureMetadata] = "hmac-sha256;sig-1;name;" + hex.EncodeToString(make([]byte, 32))
		}
		confirm, err := channel.PublishWithDeferredConfirm("", "orders", false, false, amqp091.Publishing{
			MessageId: fmt.Sprintf("forged-%d", i), Headers: headers, Body: []byte("gold for a stranger"),
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), testserver.MaxWait)
		defer cancel()
		if ok, err := confirm.WaitContext(ctx); !ok || err != nil {
			t.Fatalf("confirmed: %t, %v", ok, err)
		}
	}
}

func count(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	if err := db.QueryRowContext(context.WithoutCancel(t.Context()), `select count(*) from effects`).Scan(&n); err != nil {
		t.Error(err)
	}
	return n
}
