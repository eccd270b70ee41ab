package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
)

// Messages of a run.
const (
	inboxBacklog  = 60_000
	stockBacklog  = 10_000
	hotBacklog    = 10_000
	poisonBacklog = 20_000
)

const (
	inFlight        = 1000 // ours; the stock subscriber has one
	batchSize       = 250
	batchesInFlight = 2000
	hotRows         = 100
	poisonKeys      = 50
	inboxConns      = 20 // that the pool of a consumer may open
)

// consuming applies effects in PostgreSQL for messages from RabbitMQ, with a handler of
// batches and one of messages, and against a loop as it is usually written by hand.
func consuming() scenario {
	const unit = "msg/s"
	what := "RabbitMQ to effects in PostgreSQL, group commit, "
	one := what + fmt.Sprintf("one call of the handler for each message, %d in flight", inFlight)
	return scenario{
		id: "inbox", round: 13 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			return []side{
				b.consumingSide("ours", inboxBacklog, &consumption{traffic: b.traffic, add: b.ours(inbox.Config{Group: inbox.Group{Size: batchSize}}, batchesInFlight, inBatches)}),
				b.consumingSide("ours", inboxBacklog, &consumption{traffic: b.traffic, add: b.ours(inbox.Config{}, inFlight, grouped(addRow))}),
				b.consumingSide("stock router and subscriber, deduplication in the handler's transaction", stockBacklog, &consumption{traffic: b.traffic, add: b.stock}),
				b.batchLoop(),
			}, nil
		},
		rows: []row{
			{"inbox", what + fmt.Sprintf("one call of the handler, with one statement, for a group of up to %d, %d in flight", batchSize, batchesInFlight), figure{0, 0}, figure{2, 0}, unit, atLeast(15)},
			{"inbox-each", one, figure{1, 0}, figure{2, 0}, unit, atLeast(15)},
			{"inbox-limit", one, figure{1, 0}, figure{3, 0}, unit, atLeast(0.8)},
		},
	}
}

// hot has two consumers whose effects are all on the same few rows.
func hot() scenario {
	return scenario{
		id: "inbox-hot", round: 7 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			return []side{
				b.consumingSide("ours", hotBacklog, &consumption{traffic: b.traffic, routers: 2, hot: true, add: b.ours(inbox.Config{}, inFlight, grouped(b.countUp))}),
				b.consumingSide("the same with a transaction for each message", hotBacklog, &consumption{traffic: b.traffic, routers: 2, hot: true, add: b.ours(inbox.Config{}, inFlight, alone(b.countUp))}),
			}, nil
		},
		rows: []row{{
			"inbox-hot", fmt.Sprintf("two consumers, effects on %d rows, group commit", hotRows),
			figure{0, 0},
			figure{1, 0},
			"msg/s", atLeast(1),
		}},
	}
}

// poison has a key whose messages all fail, each time they are delivered.
func poison() scenario {
	return scenario{
		id: "poison-key", round: 6 * time.Second,
		sides: func(_ context.Context, b *bench) ([]side, error) {
			few := newTraffic(poisonKeys)
			failing := func(ctx context.Context, tx execer, id string, payload []byte) error {
				if i, err := few.index(id); err != nil || few.keyNumber(i) == 0 {
					return errors.Join(errPoison, err)
				}
				return addRow(ctx, tx, id, payload)
			}
			return []side{
				b.consumingSide("ours", poisonBacklog, &consumption{traffic: few, poison: true, add: b.ours(inbox.Config{}, inFlight, grouped(failing))}),
				b.consumingSide("the same without it", poisonBacklog, &consumption{traffic: few, add: b.ours(inbox.Config{}, inFlight, grouped(addRow))}),
			}, nil
		},
		rows: []row{{
			"poison-key", fmt.Sprintf("consumer with one failing key of %d: messages of the other keys", poisonKeys),
			figure{0, 0},
			figure{1, 0},
			"msg/s", atLeast(0.9),
		}},
	}
}

var errPoison = errors.New("poison")

// effect is what the handlers of all sides do to the database.
type effect func(ctx context.Context, tx execer, id string, payload []byte) error

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// addRow makes effects that touch no other message's.
func addRow(ctx context.Context, tx execer, id string, payload []byte) error {
	_, err := tx.ExecContext(ctx, `insert into bench_effects (message_id, payload) values ($1, $2)`, id, payload)
	return err
}

// countUp makes effects on a few rows. The key of a message does not say on which.
func (b *bench) countUp(ctx context.Context, tx execer, id string, _ []byte) error {
	i, err := b.traffic.index(id)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `update bench_hot set n = n + 1 where id = $1`, mix(uint64(i)*7)%hotRows)
	return err
}

// handler adds a handler to a router, with an inbox.
type handler func(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware)

// grouped calls do for each message, in the transaction of a group.
func grouped(do effect) handler { return each(do, (*inbox.Inbox).GroupMiddleware) }

// alone calls do for each message, in a transaction of its own.
func alone(do effect) handler { return each(do, (*inbox.Inbox).Middleware) }

func each(do effect, middleware func(*inbox.Inbox, message.HandlerFunc) message.HandlerFunc) handler {
	return func(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware) {
		router.AddConsumerHandler("bench", topic, subscriber, func(msg *message.Message) error {
			tx, _ := inbox.TxFromContext(msg.Context())
			return do(msg.Context(), tx, msg.UUID, msg.Payload)
		}).AddMiddleware(count, func(h message.HandlerFunc) message.HandlerFunc { return middleware(in, h) })
	}
}

// inBatches has the effects of addRow, by one statement for a batch.
func inBatches(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware) {
	router.AddConsumerHandler("bench", topic, subscriber, in.Batch(func(ctx context.Context, msgs []*message.Message) error {
		tx, _ := inbox.TxFromContext(ctx)
		query := []byte(`insert into bench_effects (message_id, payload) values `)
		args := make([]any, 0, 2*len(msgs))
		for i, msg := range msgs {
			if i > 0 {
				query = append(query, ',')
			}
			query = fmt.Appendf(query, "($%d,$%d)", 2*i+1, 2*i+2)
			args = append(args, msg.UUID, []byte(msg.Payload))
		}
		_, err := tx.ExecContext(ctx, string(query), args...)
		return err
	})).AddMiddleware(count)
}

// consumption is how a side consumes.
type consumption struct {
	traffic *traffic
	schema  string // of the inbox; "" is the default one
	routers int    // each on a subscriber and a pool of its own; 0 is one
	hot     bool   // counts effects on the hot rows
	poison  bool   // messages of key 0 have no effects
	add     func(router *message.Router, db *sql.DB, schema string, count message.HandlerMiddleware) error
}

// expected is how many of n messages have effects.
func (c *consumption) expected(n int) int {
	expected := n
	for i := 0; c.poison && i < n; i++ {
		if c.traffic.keyNumber(i) == 0 {
			expected--
		}
	}
	return expected
}

// consumingSide fills the queue, and consumes until all messages that can be are handled.
func (b *bench) consumingSide(name string, n int, c *consumption) side {
	return side{name: name, n: n, run: func(ctx context.Context, n int) (values, error) {
		if err := b.prepareEffects(ctx, c, n); err != nil {
			return nil, err
		}
		expected := c.expected(n)
		took, err := b.consume(ctx, expected, c)
		if err != nil {
			return nil, err
		}
		count := `select count(distinct message_id) + (count(*) - count(distinct message_id)) * 1000000 from bench_effects`
		if c.hot {
			count = `select sum(n) from bench_hot`
		}
		return perSecond(expected, took), b.expectRows(ctx, expected, count)
	}}
}

// prepareEffects fills the queue with n messages and empties the tables, but for ids that
// were loaded into the inbox.
func (b *bench) prepareEffects(ctx context.Context, c *consumption, n int) error {
	schema := c.schema
	if schema == "" {
		schema = "oncemill"
	}
	err := b.exec(ctx, "prepare effects",
		`drop table if exists bench_effects, bench_hot, bench_ids`,
		`create table bench_effects (message_id text not null, payload bytea not null)`,
		`create table bench_hot (id bigint primary key, n bigint not null)`,
		fmt.Sprintf(`insert into bench_hot select g, 0 from generate_series(0, %d) g`, hotRows-1),
		`create table bench_ids (message_id text primary key)`,
		`delete from `+schema+`.inbox where received_at > now() - interval '1 hour'`,
		`truncate `+schema+`.inbox_failures`)
	if err = errors.Join(err, b.settle(ctx), b.freshQueue()); err != nil {
		return err
	}
	_, err = b.publishRaw(ctx, c.traffic, n, 500)
	return err
}

// consume runs routers until n messages are acknowledged.
func (b *bench) consume(ctx context.Context, n int, c *consumption) (took time.Duration, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	handled := newCountdown(n)
	count := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err == nil {
				handled.count()
			}
			return produced, err
		}
	}
	var routers []*message.Router
	for range max(1, c.routers) {
		db, err := b.consumerDB()
		if err != nil {
			return 0, err
		}
		defer db.Close() //nolint:revive // at the end of the run
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: time.Minute}, watermill.NopLogger{})
		if err != nil {
			return 0, err
		}
		if err := c.add(router, db, c.schema, count); err != nil {
			return 0, err
		}
		routers = append(routers, router)
	}
	stopped := make(chan error, len(routers))
	begin := time.Now()
	for _, router := range routers {
		go func() { stopped <- router.Run(ctx) }()
	}
	err = handled.await(ctx)
	took = time.Since(begin)
	for _, router := range routers {
		err = errors.Join(err, router.Close())
	}
	for range routers {
		err = errors.Join(err, <-stopped)
	}
	return took, err
}

// consumerDB is a pool as a consumer has one.
func (b *bench) consumerDB() (*sql.DB, error) {
	db, err := b.open(inboxConns, oneTrip)
	if err == nil {
		db.SetMaxOpenConns(inboxConns)
	}
	return db, err
}

// ours consumes with inbox and inbox/rabbitmq.
func (b *bench) ours(cfg inbox.Config, prefetch int, handle handler) func(*message.Router, *sql.DB, string, message.HandlerMiddleware) error {
	return func(router *message.Router, db *sql.DB, schema string, count message.HandlerMiddleware) error {
		cfg.Consumer, cfg.Database, cfg.Logger = "bench", oncemill.Config{Schema: schema}, b.log
		in, err := inbox.New(db, cfg)
		if err != nil {
			return err
		}
		topology := b.topology()
		topology.Consume.Qos.PrefetchCount = prefetch
		subscriber, err := rabbitmq.New(topology, rabbitmq.Config{Logger: b.log})
		if err != nil {
			return err
		}
		handle(in, router, subscriber, count)
		return nil
	}
}

const addID = `insert into bench_ids (message_id) values ($1) on conflict do nothing`

// addOnce is the effect of a message whose id is new.
func addOnce(ctx context.Context, tx *sql.Tx, id string, payload []byte) error {
	result, err := tx.ExecContext(ctx, addID, id)
	if err != nil {
		return err
	}
	if added, err := result.RowsAffected(); added == 0 || err != nil {
		return err
	}
	return addRow(ctx, tx, id, payload)
}

// stock consumes with Watermill's subscriber and a handler that removes duplicates in a
// transaction by itself.
func (b *bench) stock(router *message.Router, db *sql.DB, _ string, count message.HandlerMiddleware) error {
	cfg := b.topology()
	cfg.Consume.Qos.PrefetchCount = inFlight
	subscriber, err := wamqp.NewSubscriber(cfg, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddConsumerHandler("bench", topic, subscriber, func(msg *message.Message) error {
		return inTx(msg.Context(), db, func(tx *sql.Tx) error { return addOnce(msg.Context(), tx, msg.UUID, msg.Payload) })
	}).AddMiddleware(count)
	return nil
}

const loopBatch = 100

// batchLoop consumes as one would write it by hand for this one purpose: a transaction and
// an acknowledgement for each hundred deliveries.
func (b *bench) batchLoop() side {
	name := fmt.Sprintf("a loop over amqp091-go with one transaction and one acknowledgement for each %d", loopBatch)
	return side{name: name, n: inboxBacklog, run: func(ctx context.Context, n int) (values, error) {
		if err := b.prepareEffects(ctx, &consumption{traffic: b.traffic}, n); err != nil {
			return nil, err
		}
		db, err := b.consumerDB()
		if err != nil {
			return nil, err
		}
		defer db.Close()
		begin := time.Now()
		err = b.withChannel(func(ch *amqp.Channel) error {
			if err := ch.Qos(inFlight, 0, false); err != nil {
				return err
			}
			deliveries, err := ch.Consume(queueName, "", false, false, false, false, nil)
			if err != nil {
				return err
			}
			for done := 0; done < n; done += loopBatch {
				if err := handleBatch(ctx, db, ch, deliveries, min(loopBatch, n-done)); err != nil {
					return err
				}
			}
			return nil
		})
		took := time.Since(begin)
		if err != nil {
			return nil, err
		}
		return perSecond(n, took), b.expectRows(ctx, n, `select count(*) from bench_effects`)
	}}
}

func handleBatch(ctx context.Context, db *sql.DB, ch *amqp.Channel, deliveries <-chan amqp.Delivery, n int) error {
	batch := make([]amqp.Delivery, n)
	for i := range batch {
		var err error
		if batch[i], err = next(ctx, deliveries); err != nil {
			return err
		}
	}
	err := inTx(ctx, db, func(tx *sql.Tx) error {
		for i := range batch {
			if err := addOnce(ctx, tx, batch[i].MessageId, batch[i].Body); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return ch.Ack(batch[n-1].DeliveryTag, true)
}
