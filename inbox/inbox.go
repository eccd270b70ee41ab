package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/steerstore"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Config configures an Inbox. Only Consumer is required.
type Config struct {
	// Consumer names the consumer: every consumer handles every message once. It is stored
	// with each id, so it must stay the same across restarts and be the same in all
	// processes that share the work. 1 to 255 bytes without control characters. Required.
	Consumer string

	// Database describes where the table is.
	Database oncemill.Config

	// Outbox takes the messages that handlers return, in the transaction of their effects.
	// Its tables must be in the inbox's database. Default: none; a handler that returns
	// messages fails with ErrNoOutbox.
	Outbox *outbox.Outbox

	// Payload decodes what producers encoded (see outbox.Config.Payload), so that handlers
	// get the plain payload. It refuses messages with a *payload.DecodeError. Decoding
	// happens before the transaction begins: no transaction waits for a store, and a refused
	// message takes no id. The topic it checks is the one that the router subscribed to.
	// Messages that handlers return are encoded by the codec of Outbox. Default: none;
	// handlers get what the broker delivered.
	Payload *payload.Codec

	// ID returns the id of a message, as handlers see it: the same for every copy, different
	// for every other message. At most 255 bytes of UTF-8 without NUL. Default: the
	// Watermill UUID. A Payload that requires signatures vouches for the UUID. If the id is
	// made of metadata, name that metadata in its SignedMetadata.
	ID func(*message.Message) string

	// Key returns the ordering key of a message, "" for none. A group holds at most one
	// message of a key. Default: the metadata outbox.KeyMetadata, where a relay sends it.
	Key func(*message.Message) string

	// DeadLetters stores messages that cannot be handled. Its table must be in the inbox's
	// database. Default: none; then a failing message is delivered again without limit, and
	// crashes are not counted.
	DeadLetters *dlq.Store

	// KeepRefused is how many messages of a topic that Verify, Payload or the subscriber
	// refused become dead letters per day, for each reason (ReasonUnverified,
	// ReasonMalformed). Anybody who can write to the broker can send such messages. Further
	// ones are acknowledged and only counted: in the table inbox_refused, in the metric
	// oncemill.inbox.failed and, at most once a second, in the log. A wrong key on this side
	// makes genuine messages look refused: watch these counts, and resend such messages from
	// the producer's history. Default: 1,000. At least 1. Raising it costs disk space and
	// operators' time.
	KeepRefused int

	// ErrorText returns the text of an error for logs, dead letters, failure records, and
	// the errors that the middleware returns. Texts of handlers' errors and panics can
	// expose payloads that are encrypted everywhere else. Default: [ErrorText], which hides
	// what the database quotes, and with it the names of constraints. If payloads are no
	// secret, set error.Error.
	ErrorText func(error) string

	// Replays publishes dead letters again when an operator asks for it. Default: none; then
	// dead letters marked for replay stay in that state.
	Replays *Replays

	// Retry defines when a message is tried again, and when it becomes a dead letter.
	Retry Retry

	// Classify inspects every error of a handler and may mark it; see Permanent, RetryAfter
	// and Unavailable. It returns the error, wrapped or not; nil leaves it as it is. Default:
	// errors keep the marks that the handler gave them.
	Classify func(error) error

	// Retention is how long ids are kept. With DeadLetters, a message created longer ago
	// (less a margin) is not handled but becomes a dead letter, if the subscriber knows its
	// age; copies of it make no further dead letters. Run removes older ids. Default: 7
	// days. At least 1 s. Raising it costs disk space, about 100 bytes an id.
	Retention time.Duration

	// Archive is called with ids that are past Retention, up to a thousand at a time, before
	// Run and Purge remove them: they remove nothing for which it has not returned nil. After
	// a crash, or if several processes run, it gets ids again, so it must be idempotent. Its
	// context ends after a minute, and then it gets them again. Ids of dead letters stay.
	// Default: none.
	Archive func(ctx context.Context, ids []ArchivedID) error

	// Fingerprint returns what distinguishes two messages with the same id, for example a
	// hash of the payload. It is stored with the id. A copy with a different fingerprint is
	// not treated as a duplicate but fails with ErrConflict. Default: none.
	Fingerprint func(*message.Message) []byte

	// Sequence returns the sequence number of a message within its key, which increases by
	// one, and whether it has one. With it the inbox enforces the order of a key: a message
	// whose number is not above that of the last one handled is acknowledged without running
	// the handler. A message that arrives early waits for those before it, up to GapWait.
	// The first message of a key may have any number. Costs one more statement. Default:
	// none.
	Sequence func(*message.Message) (seq int64, ok bool)

	// GapWait is how long a message waits for a missing earlier message. The time is
	// measured in the process and starts over when the process restarts. An earlier message
	// that failed and is to be retried is waited for just as long, counted from when its
	// retry is due; so is one that is itself waiting. Messages behind a missing one continue
	// in their order. The longer they wait, the more rarely they are delivered again.
	// Default: 30 s.
	GapWait time.Duration

	// Verify checks every message, as it arrived, before anything else does; for example its
	// signature. A message for which it returns an error fails with ErrUnverified and takes
	// no id, so a forged message blocks no genuine one. If the error is marked by
	// Unavailable or RetryAfter, or the message's context has ended, the message is
	// delivered again without limit. Default: none.
	Verify func(*message.Message) error

	// Group limits the groups of GroupMiddleware and Batch.
	Group Group

	// Timeout is how long an attempt may take, from its start to its commit. Then the
	// context of the handler ends and the attempt is rolled back. It counts as a failure
	// unless more than half of the time had passed before the handler began, waiting for a
	// connection, the id or the turn to write. It is also how long a server that does not answer can
	// delay a message: a handler's statement that the driver does not return from is then
	// abandoned, with its connection, and does not count. pgx always returns, so with pgx
	// it counts. The commit may take 10 s more; without an answer the message is delivered
	// again. 10 ms to 24 h. Default: 1 min. A group of messages shares this time.
	Timeout time.Duration

	// Isolation is the isolation level of the transactions, on PostgreSQL:
	// sql.LevelReadCommitted, LevelRepeatableRead or LevelSerializable. The higher levels
	// fail more attempts, which are then delivered again. Default: READ COMMITTED,
	// regardless of the database's default. SQLite is always serializable.
	Isolation sql.IsolationLevel

	// LockTimeout is how long an attempt waits, on PostgreSQL, for another transaction that
	// holds the same id before it fails with ErrBeingHandled. 1 ms to 1 h. Default: 1 s.
	// Raising it keeps a connection waiting for longer; lowering it causes more redeliveries
	// of messages that are being handled. It does not apply to the handler's own statements.
	// On SQLite, BEGIN waits for its turn, at most ten seconds for one transaction of
	// others.
	LockTimeout time.Duration

	// Logger receives dead letters, outages, and a summary each minute from Run; at debug
	// level each message, and failures with the time of the next delivery. docs/operations.md
	// lists all events. Default: slog.Default().
	Logger *slog.Logger

	// MeterProvider receives the metrics, which docs/operations.md lists. Default:
	// otel.GetMeterProvider().
	MeterProvider metric.MeterProvider

	// TracerProvider receives a span of each delivery ("process", then the topic), if the
	// message carries a sampled trace, or its context has a sampled span, which is then the
	// parent. The handler's context has the span, so what it publishes continues the trace.
	// Propagator extracts the trace from the metadata. Anybody who can write to the broker
	// can choose the trace of a message. Defaults: the global ones.
	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator
}

// Inbox applies the effects of each message once. It owns no connection and no goroutine.
// It is safe for concurrent use, and for many handlers.
type Inbox struct {
	db        *sql.DB
	given     Config // by the user
	cfg       Config // defaults filled in
	store     inboxstore.Store
	letters   dlqstore.Store                    // nil without Config.DeadLetters
	jitter    func(time.Duration) time.Duration // spreads a delay
	calls     *bounded.Calls                    // of the database
	archiving *bounded.Calls                    // of Config.Archive
	group     *shared
	gate      *gate
	isolation *isolation
	decoders  *semaphore.Weighted // that decode payloads
	plain     *semaphore.Weighted // bytes of decoded payloads
	refused   *refusals
	clock     clock
	telemetry *telemetry
	tracing   tracing
	failing   failing
	gaps      gaps

	perHandler atomic.Bool // PerHandler was called
	parent     string      // of a handler: the consumer of its inbox
	pauses     *pauses

	mu      sync.Mutex
	derived []*Inbox // of handlers; see PerHandler

	replayer      *replayer // nil without Config.Replays
	forgedReplays seldom    // warnings
}

// New returns an inbox on db. It does no I/O; oncemill.Migrate with [Migrations] creates
// the table. All bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps ownership of db.
func New(db *sql.DB, cfg Config) (*Inbox, error) {
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "inbox.New db", Value: "nil", Problem: "a database is needed"}
	}
	given := cfg
	resolved, err := database.Resolve(db, cfg.Database)
	cfg.Database = resolved.Config()
	errs := []error{err}
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "inbox.Config." + field, Value: value, Problem: problem})
	}
	if problem := checkConsumer(cfg.Consumer); problem != "" {
		bad("Consumer", strconv.Quote(text.Shorten(cfg.Consumer)), problem)
	}
	if cfg.Outbox != nil && cfg.Outbox.Config().Database.Dialect != resolved.Dialect {
		bad("Outbox", cfg.Outbox.Config().Database.Dialect.String(), "must be in the database of the inbox, whose dialect is "+resolved.Dialect.String())
	}
	if cfg.DeadLetters != nil && cfg.DeadLetters.Config().Database.Dialect != resolved.Dialect {
		bad("DeadLetters", cfg.DeadLetters.Config().Database.Dialect.String(), "must be in the database of the inbox, whose dialect is "+resolved.Dialect.String())
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	if cfg.Timeout < 10*time.Millisecond || cfg.Timeout > 24*time.Hour {
		bad("Timeout", cfg.Timeout.String(), "must be 10ms to 24h, or 0 for 1m")
	}
	stored := inboxstore.Config{
		Consumer: cfg.Consumer, Timeout: cfg.Timeout, Isolation: cfg.Isolation,
		LockTimeout: cfg.LockTimeout, GroupLockTimeout: cfg.Group.LockTimeout,
	}.Resolve(resolved.Dialect, bad)
	cfg.LockTimeout, cfg.Group.LockTimeout = stored.LockTimeout, stored.GroupLockTimeout
	cfg.Group.resolve(bad)
	cfg.Retry.resolve(bad)
	cfg.Replays = cfg.Replays.resolve(bad)
	if cfg.Replays != nil && cfg.DeadLetters == nil {
		bad("DeadLetters", "nil", "is required with Replays; give the store of the dead letters")
	}
	if cfg.Retention == 0 {
		cfg.Retention = 7 * 24 * time.Hour
	}
	if cfg.GapWait == 0 {
		cfg.GapWait = 30 * time.Second
	}
	if cfg.GapWait < 0 {
		bad("GapWait", cfg.GapWait.String(), "must be positive, or 0 for 30s")
	}
	if cfg.Retention < time.Second {
		bad("Retention", cfg.Retention.String(), "must be at least 1s, or 0 for 7 days")
	}
	if cfg.KeepRefused == 0 {
		cfg.KeepRefused = 1000
	}
	if cfg.KeepRefused < 0 {
		bad("KeepRefused", strconv.Itoa(cfg.KeepRefused), "must be positive, or 0 for 1000")
	}
	if cfg.ErrorText == nil {
		cfg.ErrorText = ErrorText
	}
	if cfg.Key == nil {
		cfg.Key = func(msg *message.Message) string { return msg.Metadata.Get(outbox.KeyMetadata) }
	}
	if cfg.ID == nil {
		cfg.ID = func(msg *message.Message) string { return msg.UUID }
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.MeterProvider == nil {
		cfg.MeterProvider = otel.GetMeterProvider()
	}
	if cfg.TracerProvider == nil {
		cfg.TracerProvider = otel.GetTracerProvider()
	}
	if cfg.Propagator == nil {
		cfg.Propagator = otel.GetTextMapPropagator()
	}
	guard := nopanic.NewTelemetry(cfg.Logger)
	telemetry, err := newTelemetry(cfg.MeterProvider, guard, cfg.Consumer)
	if err != nil {
		errs = append(errs, fmt.Errorf("inbox: make counters: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	in := &Inbox{db: db, given: given, cfg: cfg, store: inboxstore.Open(db, resolved, stored), telemetry: telemetry, tracing: newTracing(cfg, guard)}
	if cfg.DeadLetters != nil {
		in.letters = dlqstore.Open(cfg.DeadLetters.DB(), database.Of(cfg.DeadLetters.Config().Database))
	}
	if cfg.Replays != nil {
		in.replayer = &replayer{in: in, published: map[int64]publishedLetter{}, calls: bounded.New(publishAbandoned)}
	}
	in.pauses = &pauses{store: steerstore.Open(db, resolved)}
	in.reset(jitter)
	return in, nil
}

// reset gives an inbox the state of a process that has just started. jitter spreads a delay.
func (in *Inbox) reset(jitter func(time.Duration) time.Duration) {
	in.jitter = jitter
	in.calls, in.archiving = bounded.Over(in.db, mostAbandoned), bounded.New(archiveAbandoned)
	in.gate, in.isolation, in.gaps.jitter = newGate(jitter), newIsolation(in.cfg.Timeout), jitter
	in.decoders, in.plain = semaphore.NewWeighted(decodersAtMost), semaphore.NewWeighted(plainAtMost)
	in.refused = newRefusals(in)
	in.group = newShared(in, nil)
}

const maxID = 255 // bytes; an AMQP message id is no longer

func checkConsumer(consumer string) (problem string) {
	switch {
	case consumer == "":
		return "is required; name what handles the messages, for example stock"
	case strings.ContainsFunc(consumer, unicode.IsControl):
		return "must not hold control characters"
	}
	return text.Check(consumer, maxID)
}

// checkMessageID refuses unusable ids before anything is sent to the database.
func checkMessageID(id string) error {
	if id == "" {
		return ErrNoMessageID
	}
	if problem := text.Check(id, maxID); problem != "" {
		return &MessageIDError{MessageID: text.Shorten(id), Problem: problem}
	}
	return nil
}
