package mill_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// One request goes by two hops, and back from a dead letter in the middle, on real servers. The
// first consumer has shards.
func TestMill_FromTheRequestToTheSecondHop(t *testing.T) {
	t.Parallel()
	uri, pg := testserver.RabbitMQ(t), testserver.Postgres(t)
	if _, err := pg.DB.ExecContext(t.Context(), `create table mails (order_id text)`); err != nil {
		t.Fatal(err)
	}
	sink, err := rabbitmq.New(wamqp.NewDurablePubSubConfig(uri, nil), rabbitmq.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	mail := func(in *inbox.Inbox) (message.Subscriber, error) {
		cfg := wamqp.NewDurablePubSubConfig(uri, wamqp.GenerateQueueNameTopicNameWithSuffix("mail"))
		return inboxrabbitmq.New(cfg, inboxrabbitmq.Config{Malformed: in.Refuse, Logger: quiet})
	}
	var mended atomic.Bool
	m := newMill(t, pg.DB, mill.Config{
		Database: pg.Config, Outbox: &outbox.Config{}, Sink: sink, Idempotency: &idempotency.Config{Scope: idempotency.SingleTenant()},
		Consumers: []mill.Consumer{
			{Name: "stock", Topic: "orders", Produces: "reservations", Subscriber: inboxrabbitmq.Queue(uri, "stock", inboxrabbitmq.Config{
				Shards: inboxrabbitmq.Shards{Count: 3}, Logger: quiet,
			}), Handler: func(msg *message.Message) ([]*message.Message, error) {
				if !mended.Load() {
					return nil, inbox.Permanent(errors.New("no such article"))
				}
				return []*message.Message{message.NewMessage("reservation of "+msg.UUID, msg.Payload)}, nil
			}},
			{Name: "mail", Topic: "reservations", Subscriber: mail, Group: true, Handler: func(msg *message.Message) ([]*message.Message, error) {
				tx, _ := inbox.TxFromContext(msg.Context())
				_, err := tx.ExecContext(msg.Context(), `insert into mails values ($1)`, string(msg.Payload))
				return nil, err
			}},
		},
	})
	place := m.Idempotency().TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		if err := m.Outbox().Publish(r.Context(), tx, "orders", message.NewMessage("order 1", []byte("tea"))); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
	}))
	stop := run(t, m)
	eventually(t, "it is ready", func() bool { return m.Ready() == nil })
	for range 2 { // the second one is a retry
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader("tea"))
		request.Header.Set("Idempotency-Key", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`)
		answer := httptest.NewRecorder()
		place.ServeHTTP(answer, request)
		if answer.Code != http.StatusCreated {
			t.Fatalf("%d: %s", answer.Code, answer.Body)
		}
	}
	eventually(t, "a dead letter", func() bool { return lastError(t, m) == "no such article" })
	mended.Store(true)
	letters := list(t, m)
	if _, err := m.Letters().Replay(t.Context(), []int64{letters[0].ID}, dlq.Act{By: "ada"}); err != nil {
		t.Fatal(err)
	}
	mails := func() (n int) {
		if err := pg.DB.QueryRowContext(t.Context(), `select count(*) from mails where order_id = 'tea'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "the mail", func() bool { return mails() == 1 })
	eventually(t, "the letter is closed", func() bool { return list(t, m)[0].State == dlq.StateReplayed })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if n := mails(); n != 1 || len(letters) != 1 {
		t.Errorf("%d mails, %d letters", n, len(letters))
	}
	if m.Inbox("stock") == nil || m.Inbox("nobody") != nil {
		t.Error("Inbox does not tell its consumers apart")
	}
}

func list(t *testing.T, m *mill.Mill) []*dlq.Letter {
	t.Helper()
	found, err := m.Letters().List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead, dlq.StateReplaying, dlq.StateReplayed}})
	if err != nil {
		return nil // the tables are not there yet
	}
	return found
}

// lastError is why the newest dead letter is one.
func lastError(t *testing.T, m *mill.Mill) string {
	t.Helper()
	if found := list(t, m); len(found) > 0 {
		return found[0].Error
	}
	return ""
}
