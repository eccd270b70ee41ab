package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/rabbitmq"
)

// Messages of a run.
const (
	inboxBacklog = 60_000
	stockBacklog = 3_000
	hotBacklog   = 10_000
)

const (
	inFlight = 1000 // ours; the stock subscriber has one

	batchSize       = 250
	batchesInFlight = 2000

	hotRows = 100
	// inboxConns is what a consumer's pool may open.
	inboxConns = 20
)

// effect is what the handlers of all sides do to the database.
type effect func(ctx context.Context, tx execer, id string, payload []byte) error

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// addRow makes effects that are nobody else's business.
func addRow(ctx context.Context, tx execer, id string, payload []byte) error {
	_, err := tx.ExecContext(ctx, `insert into bench_effects (message_id, payload) values ($1, $2)`, id, payload)
	return err
}

// countUp makes effects on a few rows, which one is not to be told from the key.
func (b *bench) countUp(ctx context.Context, tx execer, id string, _ []byte) error {
	i, err := b.traffic.index(id)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `update bench_hot set n = n + 1 where id = $1`, mix(uint64(i)*7)%hotRows)
	return err
}

// prepareEffects fills the queue with n messages and empties the tables; known is
// the number of ids that the inbox has already.
func (b *bench) prepareEffects(ctx context.Context, n, known int) error {
	err := b.exec(ctx, "prepare effects",
		`drop table if exists bench_effects, bench_hot, bench_ids`,
		`create table bench_effects (message_id text not null, payload bytea not null)`,
		`create table bench_hot (id bigint primary key, n bigint not null)`,
		fmt.Sprintf(`insert into bench_hot select g, 0 from generate_series(0, %d) g`, hotRows-1),
		`create table bench_ids (message_id text primary key)`)
	if err != nil {
		return err
	}
	var have int
	if err := b.db.QueryRowContext(ctx, `select count(*) from oncemill.inbox where consumer = 'bench' and received_at < now() - interval '1 hour'`).Scan(&have); err != nil {
		return err
	}
	if have != known {
		err = b.exec(ctx, "fill inbox", `truncate oncemill.inbox`, `alter table oncemill.inbox disable trigger user`,
			fmt.Sprintf(`insert into oncemill.inbox (consumer, message_id, received_at) select 'bench', gen_random_uuid()::text, now() - interval '2 hours' from generate_series(1, %d)`, known),
			`alter table oncemill.inbox enable trigger user`)
	} else {
		err = b.exec(ctx, "empty inbox", `delete from oncemill.inbox where received_at > now() - interval '1 hour'`)
	}
	if err != nil {
		return err
	}
	if err := b.settle(ctx); err != nil {
		return err
	}
	if err := b.freshQueue(); err != nil {
		return err
	}
	_, err = publishRaw(ctx, b.servers.amqp, b.traffic, n, 500)
	return err
}

// checkEffects is nil if each of n messages has had one effect.
func (b *bench) checkEffects(ctx context.Context, n int, hot bool) error {
	var rows, different int
	query := `select count(*), count(distinct message_id) from bench_effects`
	if hot {
		query = `select sum(n), sum(n) from bench_hot`
	}
	if err := b.db.QueryRowContext(ctx, query).Scan(&rows, &different); err != nil {
		return err
	}
	if rows != n || different != n {
		return fmt.Errorf("%d effects of %d messages, wanted %d", rows, different, n)
	}
	return nil
}

// consumerDB is a pool as a consumer has one, with one round trip a statement.
func (b *bench) consumerDB() (*sql.DB, error) {
	u, err := url.Parse(b.servers.postgres)
	if err != nil {
		return nil, err
	}
	q := u.Query()
	q.Set("binary_parameters", "yes")
	u.RawQuery = q.Encode()
	db, err := sql.Open("postgres", u.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(inboxConns)
	db.SetMaxIdleConns(inboxConns)
	return db, nil
}

// consume runs routers, each on a subscriber and a pool of its own, until n messages
// are acknowledged, which is when the queue is empty.
func (b *bench) consume(ctx context.Context, n, routers int, add func(*message.Router, *sql.DB, message.HandlerMiddleware) error) (took time.Duration, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	handled := make(chan struct{}, n)
	count := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err == nil {
				handled <- struct{}{}
			}
			return produced, err
		}
	}
	var all []*message.Router
	stopped := make(chan error, routers)
	for range routers {
		db, err := b.consumerDB()
		if err != nil {
			return 0, err
		}
		defer db.Close()
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: time.Minute}, watermill.NopLogger{})
		if err != nil {
			return 0, err
		}
		if err := add(router, db, count); err != nil {
			return 0, err
		}
		all = append(all, router)
	}
	begin := time.Now()
	for _, router := range all {
		go func() { stopped <- router.Run(ctx) }()
	}
	for i := range n {
		select {
		case <-handled:
		case <-ctx.Done():
			return 0, fmt.Errorf("%w after %d of %d messages", ctx.Err(), i, n)
		}
	}
	took = time.Since(begin)
	var errs []error
	for _, router := range all {
		errs = append(errs, router.Close())
	}
	for range all {
		errs = append(errs, <-stopped)
	}
	return took, errors.Join(errs...)
}

// how a handler stands in the inbox.
type how struct {
	group    inbox.Group
	inFlight int
	add      func(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware)
}

// each calls do for each message, in a transaction of its own or in that of a group.
func each(grouped bool, do effect) how {
	add := func(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware) {
		middleware := in.Middleware
		if grouped {
			middleware = in.GroupMiddleware
		}
		router.AddConsumerHandler("bench", topic, subscriber, func(msg *message.Message) error {
			tx, _ := inbox.TxFromContext(msg.Context())
			return do(msg.Context(), tx, msg.UUID, msg.Payload)
		}).AddMiddleware(count, middleware)
	}
	return how{inFlight: inFlight, add: add}
}

// inBatches has the effects of addRow, by one statement for a batch.
func inBatches() how {
	add := func(in *inbox.Inbox, router *message.Router, subscriber message.Subscriber, count message.HandlerMiddleware) {
		router.AddConsumerHandler("bench", topic, subscriber, in.Batch(addRows)).AddMiddleware(count)
	}
	return how{group: inbox.Group{Size: batchSize}, inFlight: batchesInFlight, add: add}
}

func addRows(ctx context.Context, msgs []*message.Message) error {
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
}

// ours consumes with inbox and inbox/rabbitmq.
func (b *bench) oursConsuming(name string, n, known, consumers int, handle how) side {
	hot := consumers > 1
	return side{name: name, n: n, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.prepareEffects(ctx, n, known); err != nil {
			return 0, err
		}
		stopProfile, err := b.startProfile()
		if err != nil {
			return 0, err
		}
		defer stopProfile()
		took, err := b.consume(ctx, n, consumers, func(router *message.Router, db *sql.DB, count message.HandlerMiddleware) error {
			in, err := inbox.New(db, inbox.Config{Consumer: "bench", Group: handle.group, Logger: b.log})
			if err != nil {
				return err
			}
			cfg := b.topology()
			cfg.Consume.Qos.PrefetchCount = handle.inFlight
			subscriber, err := rabbitmq.New(cfg, rabbitmq.Config{Logger: b.log})
			if err != nil {
				return err
			}
			handle.add(in, router, subscriber, count)
			return nil
		})
		if err != nil {
			return 0, err
		}
		return perSecond(n, took), b.checkEffects(ctx, n, hot)
	}}
}

const addID = `insert into bench_ids (message_id) values ($1) on conflict do nothing`

// stock consumes with Watermill's own subscriber and a handler that removes
// duplicates in a transaction by itself.
func (b *bench) stock() side {
	return side{name: "stock", n: stockBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.prepareEffects(ctx, n, 0); err != nil {
			return 0, err
		}
		took, err := b.consume(ctx, n, 1, func(router *message.Router, db *sql.DB, count message.HandlerMiddleware) error {
			cfg := b.topology()
			cfg.Consume.Qos.PrefetchCount = inFlight
			subscriber, err := wamqp.NewSubscriber(cfg, watermill.NopLogger{})
			if err != nil {
				return err
			}
			router.AddConsumerHandler("bench", topic, subscriber, func(msg *message.Message) error {
				ctx := msg.Context()
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback() //nolint:errcheck // a no-op after the commit
				result, err := tx.ExecContext(ctx, addID, msg.UUID)
				if err != nil {
					return err
				}
				if added, err := result.RowsAffected(); added == 0 || err != nil {
					return err
				}
				if err := addRow(ctx, tx, msg.UUID, msg.Payload); err != nil {
					return err
				}
				return tx.Commit()
			}).AddMiddleware(count)
			return nil
		})
		if err != nil {
			return 0, err
		}
		return perSecond(n, took), b.checkEffects(ctx, n, false)
	}}
}

// byHand is a side without a library: consume gets n deliveries and ends when it has
// acknowledged them.
func (b *bench) byHand(name string, consume func(ctx context.Context, db *sql.DB, ch *amqp.Channel, deliveries <-chan amqp.Delivery, n int) error) side {
	return side{name: name, n: inboxBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.prepareEffects(ctx, n, 0); err != nil {
			return 0, err
		}
		db, err := b.consumerDB()
		if err != nil {
			return 0, err
		}
		defer db.Close()
		begin := time.Now()
		var took time.Duration
		err = withChannel(b.servers.amqp, func(ch *amqp.Channel) error {
			if err := ch.Qos(inFlight, 0, false); err != nil {
				return err
			}
			deliveries, err := ch.Consume(queueName, "", false, false, false, false, nil)
			if err != nil {
				return err
			}
			if err := consume(ctx, db, ch, deliveries, n); err != nil {
				return err
			}
			took = time.Since(begin)
			return ch.Close()
		})
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		return perSecond(n, took), b.checkEffects(ctx, n, false)
	}}
}

// batchLoop consumes as one would write it by hand for this one purpose: a
// transaction for each hundred deliveries, one acknowledgement for all of them.
func (b *bench) batchLoop() side {
	return b.byHand("batch loop", func(ctx context.Context, db *sql.DB, ch *amqp.Channel, deliveries <-chan amqp.Delivery, n int) error {
		for done := 0; done < n; {
			batch, err := nextBatch(ctx, deliveries, min(100, n-done))
			if err != nil {
				return err
			}
			if err := handleBatch(ctx, db, batch); err != nil {
				return err
			}
			if err := ch.Ack(batch[len(batch)-1].DeliveryTag, true); err != nil {
				return err
			}
			done += len(batch)
		}
		return nil
	})
}

func nextBatch(ctx context.Context, deliveries <-chan amqp.Delivery, n int) (batch []amqp.Delivery, err error) {
	for range n {
		select {
		case d, ok := <-deliveries:
			if !ok {
				return nil, amqp.ErrClosed
			}
			batch = append(batch, d)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return batch, nil
}

func handleBatch(ctx context.Context, db *sql.DB, batch []amqp.Delivery) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	for i := range batch {
		d := &batch[i]
		result, err := tx.ExecContext(ctx, addID, d.MessageId)
		if err != nil {
			return err
		}
		added, err := result.RowsAffected()
		if err != nil {
			return err
		}
		if added == 0 {
			continue
		}
		if err := addRow(ctx, tx, d.MessageId, d.Body); err != nil {
			return err
		}
	}
	return tx.Commit()
}
