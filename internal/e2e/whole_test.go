package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

const (
	producers = 4
	maxWait   = testserver.MaxWait
)

// TestWholeWay goes from a transaction over outbox, relay and RabbitMQ to an inbox
// and its effect, and a second time with what the handler produces. A worker is
// killed in the middle. TestSetups runs it in each of its set-ups.
func TestWholeWay(t *testing.T) {
	t.Parallel()
	pg, uri := testserver.Postgres(t), testserver.RabbitMQ(t)
	pool := func() *sql.DB { return testserver.Pool(pg.DB, func() *sql.DB { return pg.Open(t) }) }
	if err := oncemill.Migrate(t.Context(), pool(), pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	// No unique constraint, so an effect that happens twice shows.
	execute(t, pg.DB, `create table written (message_id text not null)`)
	execute(t, pg.DB, `create table effects (position bigserial, topic text not null, message_id text not null)`)
	box, err := outbox.New(pool(), outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	stopConsuming := consume(t, pool(), pg.Config, uri)

	spec := workerSpec{DSN: pg.URL(t, "binary_parameters=yes"), Database: pg.Config, AMQP: uri}
	first := startWorker(t, spec)
	producing, stopProducing := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() { stopProducing(); group.Wait() })
	for n := range producers {
		group.Go(func() { produce(t, producing, box, n) })
	}
	effects := func() int { return count(t, pg.DB, `select count(*) from effects`) }
	more := func(n int) {
		t.Helper()
		n += effects()
		eventually(t, "more effects", func() bool { return effects() > n })
	}
	workers := "select count(distinct owner) from " + database.Of(box.Config().Database).Table("relay_leases") + " where owner <> '' and lane >= 0 and lease_until > clock_timestamp()"
	holding := func(n int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d workers hold lanes", n), func() bool { return count(t, pg.DB, workers) == n })
	}
	size := 25
	if long {
		size = 500
	}
	more(size)
	first.kill()
	second := startWorker(t, spec) // takes over when the leases have expired
	more(size)
	third := startWorker(t, spec)
	holding(2)
	more(size)
	second.end() // hands over
	holding(1)
	more(size)
	stopProducing()
	group.Wait()
	eventually(t, "nothing is owed and all has its effect", func() bool {
		return count(t, pg.DB, "select count(*) from "+database.Of(box.Config().Database).Table("outbox")) == 0 &&
			effects() == 2*count(t, pg.DB, `select count(*) from written`)
	})
	third.end()
	stopConsuming()

	written := testserver.Texts(t, pg.DB, `select message_id from written order by 1`)
	var answers []string
	for _, id := range written {
		answers = append(answers, "answer to "+id)
	}
	if got := testserver.Texts(t, pg.DB, `select message_id from effects where topic = 'orders' order by 1`); !slices.Equal(got, written) {
		t.Errorf("%d effects of %d messages, or not theirs", len(got), len(written))
	}
	slices.Sort(answers)
	got := testserver.Texts(t, pg.DB, `select message_id from effects where topic = 'answers'`)
	slices.Sort(got)
	if !slices.Equal(got, answers) {
		t.Errorf("%d effects of the answers to %d messages, or not theirs", len(got), len(written))
	}
	// One active consumer and no retries: effects are in the order of each key.
	for n := range producers {
		key := fmt.Sprintf("key%d/", n)
		effects := testserver.Texts(t, pg.DB, `select message_id from effects where topic = 'orders' and starts_with(message_id, '`+key+`') order by position`)
		if !slices.IsSorted(effects) || len(effects) == 0 {
			t.Errorf("%s: %d effects, not in order", key, len(effects))
		}
	}
	if slices.ContainsFunc(written, func(id string) bool { return strings.Contains(id, "gone") }) {
		t.Error("a transaction that was rolled back has left something")
	}
}

// produce runs transactions that write a row and publish a message, some of which
// roll back, until ctx ends.
func produce(t *testing.T, ctx context.Context, box *outbox.Outbox, producer int) {
	rng := rand.New(rand.NewPCG(uint64(producer), 11)) //nolint:gosec // no secret
	rollback := errors.New("rolled back")
	for n := 0; ctx.Err() == nil; n++ {
		gone := rng.IntN(5) == 0
		err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			id := fmt.Sprintf("key%d/%06d", producer, n)
			if gone {
				id += "-gone"
			}
			if _, err := tx.ExecContext(ctx, `insert into written values ($1)`, id); err != nil {
				return err
			}
			msg := message.NewMessage(id, []byte(id))
			outbox.SetKey(msg, fmt.Sprint("key", producer))
			if err := box.Publisher(tx).Publish("orders", msg); err != nil || !gone {
				return err
			}
			return rollback
		})
		if gone != errors.Is(err, rollback) || !gone && err != nil {
			t.Errorf("transaction: %v", err)
			return
		}
		testserver.Pause(t.Context(), testserver.Rounds(25*time.Millisecond, 5*time.Millisecond))
	}
}

// consume runs a router whose handlers leave an effect of each message; orders
// are answered.
func consume(t *testing.T, db *sql.DB, database oncemill.Config, uri string) (stop func()) {
	t.Helper()
	box, err := outbox.New(db, outbox.Config{Database: database})
	if err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock", Database: database, Outbox: box})
	if err != nil {
		t.Fatal(err)
	}
	config := amqp.NewDurablePubSubConfig(uri, amqp.GenerateQueueNameTopicNameWithSuffix("stock"))
	config.Marshaler = inboxrabbitmq.Marshaler{}
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router := message.NewDefaultRouter(watermill.NopLogger{})
	effect := func(topic string, msg *message.Message) error {
		tx, ok := inbox.TxFromContext(msg.Context())
		if !ok {
			return errors.New("no transaction")
		}
		_, err := tx.ExecContext(msg.Context(), `insert into effects (topic, message_id) values ($1, $2)`, topic, msg.UUID)
		return err
	}
	router.AddHandler("reserve", "orders", subscriber, "answers", nobody{}, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("answer to "+msg.UUID, nil)}, effect("orders", msg)
	})
	router.AddConsumerHandler("note", "answers", subscriber, func(msg *message.Message) error { return effect("answers", msg) })
	router.AddMiddleware(in.Middleware)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
	<-router.Running()
	stop = sync.OnceFunc(func() {
		if err := errors.Join(router.Close(), <-ended, subscriber.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// nobody publishes for a router whose handlers' messages go to the outbox.
type nobody struct{}

func (nobody) Publish(string, ...*message.Message) error {
	return errors.New("the router publishes by itself")
}
func (nobody) Close() error { return nil }

func execute(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement); err != nil {
		t.Fatal(err)
	}
}

func count(t *testing.T, db *sql.DB, query string) (n int) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
		t.Error(err)
	}
	return n
}

var eventually = testserver.Eventually
