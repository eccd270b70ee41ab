package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/tracecontext"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Migrations creates the tables outbox, outbox_history and scheduled.
var Migrations = oncemill.Migrations{Name: "outbox", FS: outboxstore.Migrations}

// mostAbandoned is how many transactions of RunInTx may be left behind on a server that
// does not answer. Each holds a connection.
const mostAbandoned = 64

// NoHistory as Config.History keeps no delivered messages.
const NoHistory time.Duration = -1

// Config configures an Outbox. The zero value is right for most services. All processes
// that work on one outbox, producers and relays, must use the same Database and
// History.
type Config struct {
	// Database describes the database and the location of the tables.
	Database oncemill.Config

	// Payload compresses, encrypts, offloads and signs published messages, as
	// configured. Consumers need a codec that reverses it (see inbox.Config.Payload).
	// The caller's messages are not changed. Default: none; payloads are stored and
	// sent as they are.
	Payload *payload.Codec

	// MaxPayload is the largest payload in bytes that Publish accepts, as stored: after
	// Payload. Default: 1 MiB. At most 128 MiB. Larger messages cost memory in the
	// relay and the broker. RabbitMQ itself refuses more than its max_message_size.
	MaxPayload int

	// Key returns the ordering key of a message, "" for none. Default: the metadata
	// entry KeyMetadata.
	Key func(*message.Message) string

	// History is the minimum time that delivered messages are kept in outbox_history,
	// for search and resend. PostgreSQL removes them by whole days. Default: 24 h.
	// NoHistory keeps none, which saves about 700 bytes of write-ahead log per message.
	History time.Duration

	// Archive is called with delivered messages that are past History, at most 500 at a
	// time, before they are removed. None is removed before Archive has returned nil.
	// After an error, a panic or a crash the messages are kept and Archive is called with
	// them again, so it must be idempotent. A slow Archive delays nothing else. ctx is the
	// relay's, and ends with it. Every relay of this outbox needs the function: one
	// without it removes rows without archiving them. Default: none, rows are just
	// removed.
	Archive func(ctx context.Context, rows []HistoryRow) error

	// Truncate controls whether relays of this outbox may truncate partitions of its
	// table to remove dead rows (PostgreSQL). To replay a truncation, a hot standby has
	// to cancel its queries on the outbox, or stops replaying. Default: TruncateAuto.
	Truncate Truncation

	// Propagator writes the trace of a message's context into its metadata
	// (traceparent, for W3C Trace Context), so that relays and consumers can continue
	// it. An existing entry is kept. Default: OpenTelemetry's global propagator, which
	// writes nothing unless it was set.
	Propagator propagation.TextMapPropagator

	// CommitTimeout is how long RunInTx waits for the answer to a COMMIT, even if its
	// context has ended meanwhile. After that it returns ErrCommitUnknown. With
	// synchronous replication a COMMIT waits for the standby. Default: 10 s. At least 1
	// ms, at most 1 h.
	CommitTimeout time.Duration

	// Prepare keeps the statement that writes one message prepared on each connection.
	// This saves parsing, and with lib/pq a round trip. It applies to transactions of
	// RunInTx when you publish with the context that RunInTx passes. Close rows before
	// you publish: with lib/pq, open rows then cost the connection. Do not use it with
	// a pooler in transaction mode that does not support prepared statements (PgBouncer
	// before 1.21). Default: false.
	Prepare bool

	// Retries is how often RunInTx runs its function again after a serialization
	// failure or a deadlock. Default: 10.
	Retries int

	// Logger receives events that need an operator's attention and, at debug level, each
	// message. Default: slog.Default().
	Logger *slog.Logger
}

// Truncation controls when partitions of the outbox are truncated. They are truncated
// only where dead rows slow reads down: a long transaction keeps vacuum from removing
// them, or vacuum does not keep up.
type Truncation uint8

const (
	// TruncateAuto leaves dead rows to vacuum while a standby is connected or a
	// physical replication slot exists. A standby that reads archived WAL without a
	// slot is not detected: set TruncateNever there.
	TruncateAuto Truncation = iota

	// TruncateAlways truncates with or without standbys.
	TruncateAlways

	// TruncateNever leaves dead rows to vacuum. Reads become slower while a long
	// transaction keeps vacuum from removing them.
	TruncateNever
)

// Outbox is the write side of an outbox. A relay is its read side. It holds no
// connection and no goroutine. It is safe for concurrent use.
type Outbox struct {
	db     *sql.DB
	cfg    Config
	store  outboxstore.Store
	calls  *bounded.Calls // of RunInTx
	traces *tracecontext.Carrier

	prepared prepared

	commits signal // of this process; Notifiers pass them on
	wake    signal // those, and a Listener's notifications; relays receive it
}

// New returns an outbox on db. It does no I/O; oncemill.Migrate creates the tables with
// [Migrations]. All bad values of cfg are reported at once, each as an
// [*oncemill.ConfigError]. The caller keeps ownership of db.
func New(db *sql.DB, cfg Config) (*Outbox, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "outbox.Config." + field, Value: value, Problem: problem})
	}
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "outbox.New db", Value: "nil", Problem: "a database is needed"}
	}
	resolved, err := database.Resolve(db, cfg.Database)
	if err != nil {
		errs = append(errs, err)
	}
	cfg.Database = resolved.Config()
	const mostPayload = 128 << 20
	switch {
	case cfg.MaxPayload == 0:
		cfg.MaxPayload = 1 << 20
	case cfg.MaxPayload < 0 || cfg.MaxPayload > mostPayload:
		bad("MaxPayload", strconv.Itoa(cfg.MaxPayload), "must be 1 to "+strconv.Itoa(mostPayload)+" bytes, or 0 for 1 MiB")
	}
	switch {
	case cfg.History == 0:
		cfg.History = 24 * time.Hour
	case cfg.History == NoHistory:
	case cfg.History < time.Hour:
		bad("History", cfg.History.String(), "must be at least 1h, or 0 for 24h, or outbox.NoHistory")
	}
	switch {
	case cfg.CommitTimeout == 0:
		cfg.CommitTimeout = boundtx.CommitLimit
	case cfg.CommitTimeout < time.Millisecond || cfg.CommitTimeout > time.Hour:
		bad("CommitTimeout", cfg.CommitTimeout.String(), "must be 1ms to 1h, or 0 for "+boundtx.CommitLimit.String())
	}
	switch {
	case cfg.Retries == 0:
		cfg.Retries = 10
	case cfg.Retries < 0:
		bad("Retries", strconv.Itoa(cfg.Retries), "must not be negative; 0 means 10")
	}
	if cfg.Truncate > TruncateNever {
		bad("Truncate", strconv.Itoa(int(cfg.Truncate)), "must be TruncateAuto, TruncateAlways or TruncateNever")
	}
	if cfg.Key == nil {
		cfg.Key = func(msg *message.Message) string { return msg.Metadata.Get(KeyMetadata) }
	}
	if cfg.Propagator == nil {
		cfg.Propagator = otel.GetTextMapPropagator()
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Outbox{db: db, cfg: cfg, store: outboxstore.Open(db, resolved), calls: bounded.New(mostAbandoned), traces: tracecontext.New(cfg.Propagator)}, nil
}

// RunInTx runs fn in a new transaction, which the context also carries. It then commits
// and wakes the relays of this process. An error or a panic of fn rolls back. After a
// serialization failure or a deadlock, in fn or at the commit, RunInTx runs fn again.
// So fn must have no effects outside the transaction. It must not commit or roll back
// itself.
//
// On SQLite it waits for its turn to write until ctx ends. fn must be short, since
// nobody else can write meanwhile. Its errors there are those of oncemill, see
// [oncemill.ErrNestedTx].
//
// If ctx ends before the commit, the transaction is rolled back. Once the COMMIT has
// been sent, RunInTx waits for its answer for up to Config.CommitTimeout. The end of
// ctx does not cancel the COMMIT, since PostgreSQL would then no longer wait for a
// synchronous standby. Without an answer the error is [ErrCommitUnknown]. While a
// server is silent, a statement of fn returns when its driver does. With lib/pq that
// may be long after ctx has ended.
func (o *Outbox) RunInTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	for attempt := 0; ; attempt++ {
		err := o.runOnce(ctx, fn)
		if err == nil {
			o.Wake()
			if o.cfg.Prepare {
				o.prepare(ctx)
			}
			return nil
		}
		if !sqlerr.Retryable(err) || errors.Is(err, ErrCommitUnknown) || errors.Is(err, oncemill.ErrDatabaseLocked) || attempt == o.cfg.Retries {
			return err
		}
		// Gives the other transaction time to finish. The random wait keeps two that lost
		// from colliding again.
		wait := time.Duration(rand.Int64N(int64(time.Millisecond) << min(attempt, 7))) //nolint:gosec // no secret
		if !sleep.For(ctx, wait) {
			return err
		}
	}
}

func (o *Outbox) runOnce(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	tx, err := boundtx.Begin(ctx, o.db, o.cfg.Database.Dialect, o.calls, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	// A no-op after Commit; after an error or a panic of fn it is the rollback.
	defer tx.Rollback()
	within := oncemill.ContextWithTx(ctx, tx.Raw)
	if stmt := o.prepared.insert.Load(); stmt != nil {
		within = context.WithValue(within, ownKey{o}, &ownTx{tx: tx, prepared: stmt})
	}
	if err := fn(within, tx.Raw); err != nil {
		return err
	}
	err = tx.Commit(o.cfg.CommitTimeout)
	if errors.Is(err, boundtx.ErrUnknown) {
		return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	return err
}

// Wake notifies the relays of this process that something was committed. RunInTx calls it.
// If you commit a transaction in another way, call Wake, or leave it to the relay's
// next poll. It never blocks, and many calls are merged into one wake-up. A [Notifier]
// passes it on to other processes.
func (o *Outbox) Wake() {
	o.wake.raise()
	o.commits.raise()
}

// Listen returns a channel that receives after commits of this process, see
// [Outbox.Wake], and a function that stops it.
func (o *Outbox) Listen() (wake <-chan struct{}, stop func()) { return o.wake.listen() }

// Config returns the configuration with its defaults filled in, for packages that keep
// tables next to the outbox.
func (o *Outbox) Config() Config { return o.cfg }

// DB returns the database passed to New.
func (o *Outbox) DB() *sql.DB { return o.db }
