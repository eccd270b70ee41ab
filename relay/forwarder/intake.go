package forwarder

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"time"

	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v4"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// Config configures an [Intake]. It repeats the configuration of Watermill's forwarder and
// of the subscriber that the forwarder reads from. The zero value is right for a forwarder
// with defaults throughout.
type Config struct {
	// Topic is the forwarder's own topic, forwarder.Config.ForwarderTopic.
	// Default: forwarder_topic.
	Topic string

	// ConsumerGroup is that of the forwarder's subscriber. Default: the empty group, the
	// subscriber's default.
	ConsumerGroup string

	// FromStart moves the whole table when the consumer group has no offset, which means
	// that no forwarder ever ran. Without it such a group is refused with
	// ErrNoConsumerGroup. watermill-sql deletes nothing, so a mistyped group would send
	// again everything that was sent since the table was created.
	FromStart bool

	// Schema and Offsets are the subscriber's adapters, which name the tables. A larger
	// SubscribeBatchSize is faster and costs memory. Defaults: DefaultPostgreSQLSchema with
	// batches of 500, DefaultPostgreSQLOffsetsAdapter.
	Schema  watermillsql.SchemaAdapter
	Offsets watermillsql.OffsetsAdapter

	// Key returns the ordering key of a message, "" for none. Default: the key that its
	// metadata already has under outbox.KeyMetadata, otherwise its topic, so that each topic
	// keeps the order that the forwarder gave it. One key costs a round trip to the broker
	// for each message, so a key per message is faster where it is sufficient. An outbox
	// with a Config.Key of its own ignores this one.
	Key func(topic string, msg *message.Message) string

	// Reject takes a message that cannot be moved: one that is not an envelope, or that the
	// outbox does not accept. It stores the message in tx, which also moves the offset; an
	// error stops Run. Default: none; Run stops with an [*EnvelopeError], and nothing behind
	// that message moves.
	Reject func(ctx context.Context, tx *sql.Tx, envelope *message.Message, cause error) error

	// Poll is the pause after a poll that found nothing. Default: 250 ms.
	Poll time.Duration

	// Logger receives problems with the database. Default: slog.Default().
	Logger *slog.Logger
}

// Intake moves what a forwarder's producers wrote into an outbox. See [New].
type Intake struct {
	box *outbox.Outbox
	cfg Config
	id  []byte // of this consumer, for offsets adapters that want one

	calls *bounded.Calls
}

const (
	// txLimit bounds a transaction of an intake.
	txLimit = time.Minute

	// maxAbandoned is how many transactions that do not return may be abandoned. Each holds
	// a goroutine and a connection.
	maxAbandoned = 4
)

// New returns an intake for the table watermill_<topic> that producers fill through
// Watermill's forwarder.Publisher and watermill-sql/v3. It replaces the forwarder, so that
// a service can migrate to the outbox without losing a message. See
// docs/migrate-from-forwarder.md.
//
// The table and the outbox must be in one PostgreSQL database, that of box. Envelopes move
// in the transaction that moves the consumer group's offset: each exactly once, whenever
// the intake is killed. Any number of intakes, and the forwarder itself, may run at once,
// since each holds the group's row while it works. Then an envelope takes one of the two
// ways, and those that the forwarder takes may overtake others. A message keeps its id,
// payload and metadata, and gets an ordering key.
//
// watermill-sql's own statements decide what is read, and when: no row that commits late
// is skipped, and no row is seen before every older transaction of the server has ended.
//
// New does no I/O. All bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError].
func New(box *outbox.Outbox, cfg Config) (*Intake, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "forwarder." + field, Value: value, Problem: problem})
	}
	switch {
	case box == nil:
		bad("New box", "nil", "an outbox is needed")
	case box.Config().Database.Dialect != oncemill.PostgreSQL:
		bad("New box", box.Config().Database.Dialect.String(), "must be on PostgreSQL, in the database of the forwarder's table")
	}
	if cfg.Topic == "" {
		cfg.Topic = "forwarder_topic"
	}
	if !forwarderTopic.MatchString(cfg.Topic) {
		bad("Config.Topic", strconv.Quote(cfg.Topic), "must be a topic of watermill-sql: letters, digits and - $ : . _")
	}
	if cfg.Poll == 0 {
		cfg.Poll = 250 * time.Millisecond
	}
	if cfg.Poll < time.Millisecond || cfg.Poll > time.Hour {
		bad("Config.Poll", cfg.Poll.String(), "must be 1ms to 1h, or 0 for 250ms")
	}
	if cfg.Schema == nil {
		cfg.Schema = watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 500}
	}
	if cfg.Offsets == nil {
		cfg.Offsets = watermillsql.DefaultPostgreSQLOffsetsAdapter{}
	}
	if cfg.Key == nil {
		cfg.Key = keyOfTopic
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Intake{box: box, cfg: cfg, id: []byte(rand.Text())[:16], calls: bounded.Over(box.DB(), maxAbandoned)}, nil
}

// forwarderTopic matches the topics that watermill-sql makes table names of.
var forwarderTopic = regexp.MustCompile(`^[A-Za-z0-9\-$:._]+$`)

func keyOfTopic(topic string, msg *message.Message) string {
	if key := msg.Metadata.Get(outbox.KeyMetadata); key != "" {
		return key
	}
	return topic
}

// Run moves envelopes until ctx ends, then returns nil. While the database is unavailable,
// it keeps trying. It returns an error for problems that waiting cannot solve:
// [ErrNoConsumerGroup], missing tables, and an [*EnvelopeError].
func (in *Intake) Run(ctx context.Context) error {
	var failures repeats.Series
	retry := backoff.NewExponentialBackOff(backoff.WithInitialInterval(25*time.Millisecond), backoff.WithMaxInterval(time.Second), backoff.WithMaxElapsedTime(0))
	prepared := false
	for ctx.Err() == nil {
		var more bool
		err := in.prepareOnce(ctx, &prepared)
		if err == nil {
			more, err = in.step(ctx)
		}
		wait := in.cfg.Poll
		switch {
		case err == nil:
			retry.Reset()
			if attrs, report := failures.Over(); report {
				in.cfg.Logger.InfoContext(ctx, "intake works again", append(attrs, "topic", in.cfg.Topic)...)
			}
			if more {
				continue
			}
		case ctx.Err() != nil, sqlerr.Retryable(err): // another intake, or the forwarder, was first
			wait = retry.NextBackOff()
		case in.permanent(err, prepared):
			return err
		default:
			wait = retry.NextBackOff()
			level, attrs := failures.Failed(slog.LevelWarn, err.Error())
			in.cfg.Logger.Log(ctx, level, "intake failed; retrying", append(attrs, "topic", in.cfg.Topic, "error", err)...)
		}
		sleep.For(ctx, wait)
	}
	return nil
}

// temporary reports whether an error is not the fault of the tables: the call had no answer,
// lost against another transaction, or waited too long for one.
func temporary(err error) bool {
	return bounded.Silence(err) || sqlerr.Connection(err) || sqlerr.TimedOut(err) || sqlerr.Retryable(err)
}

// permanent reports whether trying again cannot help: for a bad envelope, and for all
// errors at the start that are not temporary.
func (in *Intake) permanent(err error, prepared bool) bool {
	var bad *EnvelopeError
	return !temporary(err) && (!prepared || errors.As(err, &bad))
}

// prepareOnce checks that the tables exist and contain the consumer group.
func (in *Intake) prepareOnce(ctx context.Context, prepared *bool) error {
	if *prepared {
		return nil
	}
	_, err := in.inTx(ctx, sql.LevelDefault, func(ctx context.Context, tx *sql.Tx) (more bool, err error) {
		known, err := in.groupKnown(ctx, tx)
		switch {
		case err != nil || known:
			return false, err
		case !in.cfg.FromStart:
			return false, fmt.Errorf("%w: topic %s, consumer group %q", ErrNoConsumerGroup, in.cfg.Topic, in.cfg.ConsumerGroup)
		}
		for _, q := range in.cfg.Offsets.BeforeSubscribingQueries(in.cfg.Topic, in.cfg.ConsumerGroup) {
			if _, err := tx.ExecContext(ctx, q.Query, q.Args...); err != nil {
				return false, err
			}
		}
		return false, nil
	})
	if err != nil {
		return fmt.Errorf("forwarder: offsets: %w", err)
	}
	*prepared = true
	return nil
}

func (in *Intake) groupKnown(ctx context.Context, tx *sql.Tx) (known bool, err error) {
	q := in.cfg.Offsets.NextOffsetQuery(in.cfg.Topic, in.cfg.ConsumerGroup)
	rows, err := tx.QueryContext(ctx, q.Query, q.Args...)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	known = rows.Next()
	return known, rows.Err()
}

// step moves one batch and reports whether there was one.
func (in *Intake) step(ctx context.Context) (more bool, err error) {
	more, err = in.inTx(ctx, in.cfg.Schema.SubscribeIsolationLevel(), func(ctx context.Context, tx *sql.Tx) (more bool, err error) {
		rows, err := in.read(ctx, tx)
		if err != nil || len(rows) == 0 {
			return false, err
		}
		moved, err := in.move(ctx, tx, rows)
		if err != nil {
			return false, err
		}
		return true, in.ack(ctx, tx, rows[:moved])
	})
	if err != nil {
		return false, fmt.Errorf("forwarder: intake of topic %s: %w", in.cfg.Topic, err)
	}
	if more {
		in.box.Wake()
	}
	return more, nil
}

// inTx runs fn in a transaction that returns to the caller in time. An unknown outcome of
// the commit needs no handling: the next step starts from the offset in the database, and
// waits for the row that holds it.
func (in *Intake) inTx(ctx context.Context, level sql.IsolationLevel, fn func(context.Context, *sql.Tx) (more bool, err error)) (more bool, err error) {
	return bounded.Do(ctx, in.calls, txLimit, func(ctx context.Context) (more bool, err error) {
		tx, err := in.box.DB().BeginTx(ctx, &sql.TxOptions{Isolation: level})
		if err != nil {
			return false, fmt.Errorf("begin: %w", err)
		}
		defer tx.Rollback() //nolint:errcheck // of no effect after the commit, and else the first error is the one to report
		if more, err = fn(ctx, tx); err != nil {
			return false, err
		}
		if err := tx.Commit(); err != nil {
			return false, fmt.Errorf("commit: %w", err)
		}
		return more, nil
	})
}

// read returns the next rows with the adapter's own statement, which locks the offset of
// the group.
func (in *Intake) read(ctx context.Context, tx *sql.Tx) (all []watermillsql.Row, err error) {
	q := in.cfg.Schema.SelectQuery(in.cfg.Topic, in.cfg.ConsumerGroup, in.cfg.Offsets)
	rows, err := tx.QueryContext(ctx, q.Query, q.Args...)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		row, err := in.cfg.Schema.UnmarshalMessage(rows)
		if err != nil {
			return nil, fmt.Errorf("read: %w", err)
		}
		all = append(all, row)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	return all, nil
}

// move writes the envelopes' messages to the outbox, in their order. It returns how many
// rows it has moved or rejected: all, or those before the first that cannot be moved, or
// that one if it is the first and was rejected.
func (in *Intake) move(ctx context.Context, tx *sql.Tx, rows []watermillsql.Row) (int, error) {
	moved, cause := in.publish(ctx, tx, rows)
	var refused *outbox.MessageError
	switch {
	case cause == nil:
		return len(rows), nil
	case !errors.As(cause, &refused) && !errors.Is(cause, errNoEnvelope):
		return 0, cause
	case moved > 0:
		return moved, nil // the next step begins with the one in question
	}
	row := rows[0]
	bad := &EnvelopeError{Topic: in.cfg.Topic, Offset: row.Offset, MessageID: string(row.UUID), Err: cause}
	if in.cfg.Reject == nil {
		return 0, bad
	}
	if err := in.cfg.Reject(ctx, tx, row.Msg, bad); err != nil {
		return 0, &EnvelopeError{Topic: bad.Topic, Offset: bad.Offset, MessageID: bad.MessageID, Err: fmt.Errorf("%w; rejecting it: %w", cause, err)}
	}
	return 1, nil
}

// publish writes consecutive messages of one topic with one insert, up to the first that
// cannot be moved.
func (in *Intake) publish(ctx context.Context, tx *sql.Tx, rows []watermillsql.Row) (moved int, err error) {
	for moved < len(rows) {
		var topic string
		var run []*message.Message
		var noEnvelope error
		for _, row := range rows[moved:] {
			of, msg, err := unwrap(row.Msg.Payload)
			if err != nil {
				noEnvelope = err
				break
			}
			if len(run) > 0 && of != topic {
				break
			}
			topic = of
			outbox.SetKey(msg, in.cfg.Key(of, msg))
			run = append(run, msg)
		}
		err := in.box.Publish(ctx, tx, topic, run...)
		if refused := (*outbox.MessageError)(nil); errors.As(err, &refused) {
			// Nothing was sent; the messages before the refused one are valid.
			if again := in.box.Publish(ctx, tx, topic, run[:refused.Index]...); again != nil {
				return 0, again
			}
			return moved + refused.Index, err
		}
		if err != nil {
			return 0, err
		}
		moved += len(run)
		if noEnvelope != nil {
			return moved, noEnvelope
		}
	}
	return moved, nil
}

// ack moves the group's offset past rows.
func (in *Intake) ack(ctx context.Context, tx *sql.Tx, rows []watermillsql.Row) error {
	group := in.cfg.ConsumerGroup
	for _, row := range rows {
		if q := in.cfg.Offsets.ConsumedMessageQuery(in.cfg.Topic, row, group, in.id); !q.IsZero() {
			if _, err := tx.ExecContext(ctx, q.Query, q.Args...); err != nil {
				return fmt.Errorf("consumed: %w", err)
			}
		}
	}
	q := in.cfg.Offsets.AckMessageQuery(in.cfg.Topic, rows[len(rows)-1], group)
	if _, err := tx.ExecContext(ctx, q.Query, q.Args...); err != nil {
		return fmt.Errorf("ack: %w", err)
	}
	return nil
}

// errNoEnvelope is the reason for refusing a message that no forwarder.Publisher wrote.
var errNoEnvelope = errors.New("not an envelope of Watermill's forwarder")

// unwrap decodes an envelope as written by components/forwarder of Watermill 1.5.
func unwrap(payload []byte) (topic string, msg *message.Message, err error) {
	var envelope struct {
		Topic    string            `json:"destination_topic"`
		UUID     string            `json:"uuid"`
		Payload  []byte            `json:"payload"`
		Metadata map[string]string `json:"metadata"`
	}
	if err := json.Unmarshal(payload, &envelope); err != nil {
		return "", nil, fmt.Errorf("%w: %w", errNoEnvelope, err)
	}
	if envelope.Topic == "" {
		return "", nil, fmt.Errorf("%w: it has no destination topic", errNoEnvelope)
	}
	msg = message.NewMessage(envelope.UUID, envelope.Payload)
	msg.Metadata = envelope.Metadata
	return envelope.Topic, msg, nil
}
