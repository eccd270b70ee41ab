package work

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"
	amqp091 "github.com/rabbitmq/amqp091-go"
	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/outbox"
)

// Rivals are other ways from a transaction to a handler. They get the same workload, except
// for handlers that fail, and the same faults, for the contrast. Their publishers and consumers
// are watermill-amqp's with its durable pub/sub configuration; their handlers commit without
// looking whether they have handled the message before.
const (
	RivalSkipLocked = "skip-locked" // a table that workers read with SKIP LOCKED
	RivalForwarder  = "forwarder"   // Watermill's forwarder over watermill-sql
)

// way is how messages get out of a transaction. An outbox is one.
type way interface {
	RunInTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error
	Publish(ctx context.Context, tx oncemill.ExecTx, topic string, msgs ...*message.Message) error
}

// rival is a way whose other end moves messages to the broker.
type rival interface {
	way
	prepare(ctx context.Context) error // creates the tables
	move(ctx context.Context, to message.Publisher) error
}

func newRival(name string, db *sql.DB) (rival, error) {
	switch name {
	case RivalSkipLocked:
		return skipLocked{plainTx{db}}, nil
	case RivalForwarder:
		return stockForwarder{plainTx{db}}, nil
	}
	return nil, fmt.Errorf("no rival is named %q: it must be %s or %s", name, RivalSkipLocked, RivalForwarder)
}

// PrepareRival creates the tables of a rival.
func PrepareRival(ctx context.Context, dsn, name string) (err error) {
	db, err := open(DriverPq, dsn, "crucible")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	r, err := newRival(name, db)
	if err != nil {
		return err
	}
	return r.prepare(ctx)
}

// plainTx runs transactions as most services do.
type plainTx struct{ db *sql.DB }

func (p plainTx) RunInTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("%w: %w", outbox.ErrCommitUnknown, err) // a service would take it for a failure
	}
	return nil
}

type skipLocked struct{ plainTx }

const (
	createSkipLocked = `create table skip_locked (
	id bigserial primary key, topic text not null, uuid text not null, payload bytea not null, metadata jsonb not null)`

	insertSkipLocked = `insert into skip_locked (topic, uuid, payload, metadata) values ($1, $2, $3, $4)`

	takeSkipLocked = `select id, topic, uuid, payload, metadata from skip_locked order by id limit 100 for update skip locked`

	deleteSkipLocked = `delete from skip_locked where id = any ($1)`

	idlePause = 100 * time.Millisecond
)

func (s skipLocked) prepare(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, createSkipLocked)
	return err
}

func (s skipLocked) Publish(ctx context.Context, tx oncemill.ExecTx, topic string, msgs ...*message.Message) error {
	for _, msg := range msgs {
		metadata, err := json.Marshal(msg.Metadata)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, insertSkipLocked, topic, msg.UUID, []byte(msg.Payload), string(metadata)); err != nil {
			return err
		}
	}
	return nil
}

func (s skipLocked) move(ctx context.Context, to message.Publisher) error {
	for {
		moved := 0
		err := s.RunInTx(ctx, func(ctx context.Context, tx *sql.Tx) (err error) {
			moved, err = s.moveBatch(ctx, tx, to)
			return err
		})
		if (err != nil || moved == 0) && !sleep.For(ctx, idlePause) {
			return nil
		}
	}
}

func (s skipLocked) moveBatch(ctx context.Context, tx *sql.Tx, to message.Publisher) (int, error) {
	type row struct {
		topic string
		msg   *message.Message
	}
	rows, err := tx.QueryContext(ctx, takeSkipLocked)
	if err != nil {
		return 0, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err below reports what went wrong
	var batch []row
	var ids []int64
	for rows.Next() {
		var id int64
		var topic, uuid string
		var payload, metadata []byte
		if err := rows.Scan(&id, &topic, &uuid, &payload, &metadata); err != nil {
			return 0, err
		}
		r := row{topic, message.NewMessage(uuid, payload)}
		if err := json.Unmarshal(metadata, &r.msg.Metadata); err != nil {
			return 0, err
		}
		batch, ids = append(batch, r), append(ids, id)
	}
	if err := rows.Err(); err != nil {
		return 0, err
	}
	for _, r := range batch {
		if err := to.Publish(r.topic, r.msg); err != nil {
			return 0, err
		}
	}
	_, err = tx.ExecContext(ctx, deleteSkipLocked, pq.Array(ids))
	return len(ids), err
}

type stockForwarder struct{ plainTx }

const forwarderTopic = "forwarder"

func (f stockForwarder) subscriber() (*watermillsql.Subscriber, error) {
	return watermillsql.NewSubscriber(f.db, watermillsql.SubscriberConfig{
		ConsumerGroup: "forwarder", PollInterval: idlePause, InitializeSchema: true,
		SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{},
	}, watermill.NopLogger{})
}

func (f stockForwarder) prepare(context.Context) error {
	sub, err := f.subscriber()
	if err != nil {
		return err
	}
	return errors.Join(sub.SubscribeInitialize(forwarderTopic), sub.Close())
}

func (f stockForwarder) Publish(_ context.Context, tx oncemill.ExecTx, topic string, msgs ...*message.Message) error {
	raw, ok := tx.(*sql.Tx)
	if !ok {
		return fmt.Errorf("a *sql.Tx is needed, not a %T", tx)
	}
	publisher, err := watermillsql.NewPublisher(raw, watermillsql.PublisherConfig{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	return forwarder.NewPublisher(publisher, forwarder.PublisherConfig{ForwarderTopic: forwarderTopic}).Publish(topic, msgs...)
}

func (f stockForwarder) move(ctx context.Context, to message.Publisher) error {
	sub, err := f.subscriber()
	if err != nil {
		return err
	}
	daemon, err := forwarder.NewForwarder(sub, to, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwarderTopic})
	if err != nil {
		return err
	}
	return errors.Join(daemon.Run(ctx), daemon.Close())
}

// runRival does a job the rival's way until ctx ends.
func (w *worker) runRival(ctx context.Context, parts []func(context.Context) error) error {
	r, err := newRival(w.Rival, w.db)
	if err != nil {
		return err
	}
	switch w.Role {
	case RoleProducer:
		parts = append(parts, func(ctx context.Context) error { return w.produce(ctx, r) })
	case RoleRelay:
		publisher, err := amqp.NewPublisher(w.stock(nil), watermill.NopLogger{})
		if err != nil {
			return err
		}
		defer publisher.Close() //nolint:errcheck // the process ends
		parts = append(parts, func(ctx context.Context) error { return r.move(ctx, publisher) })
	default:
		router, err := w.stockRouter(r)
		if err != nil {
			return err
		}
		parts = append(parts, router.Run)
	}
	if err := w.announce(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range parts {
		group.Go(func() error { return part(ctx) })
	}
	return group.Wait()
}

func (w *worker) stock(queue amqp.QueueNameGenerator) amqp.Config {
	config := amqp.NewDurablePubSubConfig(w.AMQP, queue)
	config.Publish.ChannelPoolSize = 1 // by default each message opens a channel
	return config
}

// stockRouter handles the messages of a hop in transactions.
func (w *worker) stockRouter(r way) (*message.Router, error) {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 5 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	topic := TopicReceipts
	config := w.stock(amqp.GenerateQueueNameTopicNameWithSuffix(w.Role))
	config.Consume.Qos.PrefetchCount = 16
	if w.Role == RoleLedger {
		topic = TopicTransfers
		config.Queue.Arguments = amqp091.Table{"x-single-active-consumer": true}
	}
	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		return nil, err
	}
	router.AddConsumerHandler(w.Role, topic, subscriber, func(msg *message.Message) error {
		return r.RunInTx(msg.Context(), func(ctx context.Context, tx *sql.Tx) error {
			msg.SetContext(oncemill.ContextWithTx(ctx, tx))
			if w.Role == RoleReceipts {
				return w.effect(msg, watermill.NewUUID())
			}
			receipts, err := w.book(msg)
			if err != nil {
				return err
			}
			return r.Publish(ctx, tx, TopicReceipts, receipts...)
		})
	})
	return router, nil
}
