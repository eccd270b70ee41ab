package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// stock makes Watermill's publisher and subscribers of a broker.
type stock struct {
	publisher message.Publisher
	subscribe func() message.Subscriber
	disturb   func() // once, in the middle

	// drained reports whether nothing is about to be delivered; nil: a stop waits for nothing.
	drained func() bool
}

// The inbox over the stock subscribers of other brokers.
func TestInbox_OverOtherSubscribers(t *testing.T) {
	t.Parallel()
	t.Run("JetStream to PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		handleOnce(t, overJetStream(t), pg.DB, pg.Config)
	})
	t.Run("watermill-sql to SQLite", func(t *testing.T) {
		t.Parallel()
		handleOnce(t, overSQL(t), testserver.SQLite(t), oncemill.Config{})
	})
}

func overJetStream(t *testing.T) stock {
	broker := &jetStream{t: t, dir: t.TempDir(), port: server.RANDOM_PORT}
	broker.start()
	t.Cleanup(func() { broker.stop() })
	js := broker.stream("orders")
	forever := []nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(20 * time.Millisecond)}
	publisher, err := watermillnats.NewPublisher(watermillnats.PublisherConfig{URL: broker.url, NatsOptions: forever}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { publisher.Close() })
	return stock{
		publisher: publisher,
		subscribe: func() message.Subscriber {
			subscriber, err := watermillnats.NewSubscriber(watermillnats.SubscriberConfig{
				URL: broker.url, NatsOptions: forever, SubscribersCount: 4, QueueGroupPrefix: "stock",
				JetStream: watermillnats.JetStreamConfig{
					DurablePrefix: "stock",
					// Without ManualAck the client acknowledges what a stop has cut short.
					SubscribeOptions: []nats.SubOpt{nats.DeliverAll(), nats.AckExplicit(), nats.ManualAck(), nats.AckWait(time.Second)},
				},
			}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			return subscriber
		},
		disturb: func() { broker.stop(); broker.start() },
		// Its subscriber closes a channel that it may send to at the same time, which the race
		// detector sees.
		drained: func() bool {
			for c := range js.Consumers("orders") {
				if c.NumPending > 0 || c.NumAckPending > 0 {
					return false
				}
			}
			return true
		},
	}
}

// overSQL has a server to itself: watermill-sql waits for all transactions of it.
func overSQL(t *testing.T) stock {
	db := testserver.PrivatePostgres(t).Open()
	schema := watermillsql.DefaultPostgreSQLSchema{}
	publisher, err := watermillsql.NewPublisher(db, watermillsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	return stock{
		publisher: publisher,
		subscribe: func() message.Subscriber {
			subscriber, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
				SchemaAdapter: schema, OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
				ConsumerGroup: "stock", PollInterval: 10 * time.Millisecond, ResendInterval: 10 * time.Millisecond, RetryInterval: 10 * time.Millisecond,
			}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			return subscriber
		},
		disturb: func() {},
	}
}

// handleOnce sends messages, some of them twice, to a consumer that fails now and then,
// is cut off between effect and acknowledgement, is stopped, and goes on. One message
// cannot be handled.
func handleOnce(t *testing.T, broker stock, db *sql.DB, database oncemill.Config) {
	if err := oncemill.Migrate(t.Context(), db, database, inbox.Migrations, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	execute(t, db, `create table effects (message_id text not null)`) // no unique constraint
	letters, err := dlq.New(db, dlq.Config{Database: database})
	if err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{
		Consumer: "stock", Database: database, DeadLetters: letters,
		Retry: inbox.Retry{Tries: 1, Deliveries: 5},
	})
	if err != nil {
		t.Fatal(err)
	}
	var seen sync.Map
	first := func(what, id string) bool {
		_, before := seen.LoadOrStore(what+id, true)
		return !before
	}
	var cut atomic.Int32
	run := func() (stop func()) {
		subscriber := broker.subscribe()
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddConsumerHandler("reserve", "orders", subscriber, func(msg *message.Message) error {
			switch {
			case strings.HasPrefix(msg.UUID, "bad"):
				return inbox.Permanent(errors.New("no such article"))
			case strings.HasPrefix(msg.UUID, "odd") && first("failed ", msg.UUID):
				return errors.New("once")
			}
			tx, _ := inbox.TxFromContext(msg.Context())
			_, err := tx.ExecContext(msg.Context(), `insert into effects (message_id) values ($1)`, msg.UUID)
			return err
		}).AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				produced, err := h(msg)
				if err == nil && strings.HasSuffix(msg.UUID, "5") && first("cut ", msg.UUID) {
					cut.Add(1)
					return nil, errors.New("the process ends after the commit")
				}
				return produced, err
			}
		}, in.Middleware)
		ended := make(chan error, 1)
		go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
		<-router.Running()
		stop = sync.OnceFunc(func() {
			if broker.drained != nil && !t.Failed() {
				eventually(t, "all deliveries are acknowledged", broker.drained)
			}
			if err := errors.Join(router.Close(), <-ended); err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(stop)
		return stop
	}
	var want []string
	send := func(from, to int) {
		for i := from; i < to; i++ {
			id := fmt.Sprintf("order %03d", i)
			if i%7 == 0 {
				id = fmt.Sprintf("odd %03d", i)
			}
			want = append(want, id)
			copies := 1
			if i%3 == 0 {
				copies = 2
			}
			for range copies {
				publish(t, broker.publisher, id)
			}
		}
	}
	effects := func() []string { return testserver.Texts(t, db, `select message_id from effects order by message_id`) }
	stop := run()
	send(0, 30)
	publish(t, broker.publisher, "bad")
	eventually(t, "the first effects", func() bool { return len(effects()) > 10 })
	stop()
	send(30, 60)
	broker.disturb()
	stop = run()
	slices.Sort(want)
	eventually(t, "all effects", func() bool {
		found, err := letters.List(t.Context(), dlq.Filter{Consumer: "stock", MessageID: "bad"})
		return err == nil && len(found) == 1 && len(effects()) >= len(want)
	})
	// What was cut off comes again, and copies may still be under way.
	publish(t, broker.publisher, "last")
	want = append(want, "last")
	slices.Sort(want)
	eventually(t, "the last effect", func() bool { return slices.Contains(effects(), "last") })
	stop()
	if got := effects(); !slices.Equal(got, want) {
		t.Errorf("effects of %q, want %q", got, want)
	}
	if cut.Load() == 0 {
		t.Error("nothing was cut off: the test shows too little")
	}
}

// publish sends a message until the broker has it.
func publish(t *testing.T, p message.Publisher, id string) {
	t.Helper()
	eventually(t, "publish "+id, func() bool {
		return p.Publish("orders", message.NewMessage(id, []byte(`{"order":1}`))) == nil
	})
}
