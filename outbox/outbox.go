package outbox

import (
	"context"
	"database/sql"
	"embed"
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
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox/payload"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations makes the tables outbox, outbox_history and scheduled.
var Migrations = oncemill.Migrations{Name: "outbox", FS: sub(migrationFiles, "migrations")}

// mostAbandoned is how many transactions of RunInTx may be left to a server that does
// not answer. Each holds a connection.
const mostAbandoned = 64

// prepareLimit is how long a server may take to prepare a statement.
const prepareLimit = 10 * time.Second

// NoHistory as Config.History keeps no delivered message.
const NoHistory time.Duration = -1

// Config configures an Outbox. The zero value is right for most services. Every
// process that works on one outbox, producers and relays, uses the same
// Database and History.
type Config struct {
	// Database says where the tables are.
	Database oncemill.Config

	// Payload compresses, encrypts, stores elsewhere and signs what is
	// published, as it is configured; consumers need one that undoes it (see
	// inbox.Config.Payload). The caller's messages are not changed. Default:
	// none; payloads are stored and sent as they are.
	Payload *payload.Codec

	// MaxPayload is the largest payload in bytes that Publish accepts, as it is
	// stored: after Payload. Default: 1 MiB. At most 128 MiB. Larger messages
	// cost memory in the relay and the broker; RabbitMQ itself refuses more than
	// its max_message_size.
	MaxPayload int

	// Key returns the ordering key of a message, "" for none. Default: the
	// metadata entry KeyMetadata.
	Key func(*message.Message) string

	// History is how long delivered messages are kept in outbox_history, for
	// search and for sending again, at least: PostgreSQL gives them up by whole
	// days. Default: 24 h. NoHistory keeps none, which saves some 700 bytes of
	// write-ahead log a message.
	History time.Duration

	// Archive is called with delivered messages that are past History, before
	// they are removed, a batch of at most 500 at a time; none is removed before
	// it has returned nil. Its error, or a crash, keeps them, and it is called
	// with them again: it must be idempotent. A slow Archive delays nothing else. ctx
	// is the relay's, and ends with it. Every relay of this outbox needs the function:
	// one without it removes rows without asking. Default: none, rows are just removed.
	Archive func(ctx context.Context, rows []HistoryRow) error

	// Truncate says when relays of this outbox may truncate partitions of its table to
	// get rid of dead rows (PostgreSQL). A hot standby has to end its queries on the
	// outbox, or stops replaying, when it replays a truncation. Default: TruncateAuto.
	Truncate Truncation

	// Propagator writes the trace of a message's context into its metadata
	// (traceparent, for W3C Trace Context), so that relays and consumers can go on
	// with it. An entry that is there already stays. Default: the global one of
	// OpenTelemetry, which writes nothing unless it was set.
	Propagator propagation.TextMapPropagator

	// CommitTimeout is how long RunInTx waits for the answer to a COMMIT, also when
	// its context has ended meanwhile. After that it returns ErrCommitUnknown. With
	// synchronous replication a COMMIT waits for the standby. Default: 10 s. At least
	// 1 ms, at most 1 h.
	CommitTimeout time.Duration

	// Prepare keeps the statement that writes one message prepared on each connection,
	// which saves its parsing, and with lib/pq a round trip. It is for transactions of
	// RunInTx, published to under the context that RunInTx gives. It does not go with a
	// pooler in transaction mode that knows nothing of prepared statements (PgBouncer
	// before 1.21). Default: false.
	Prepare bool

	// Retries is how often RunInTx runs its function again after a
	// serialization failure or a deadlock. Default: 10.
	Retries int

	// Logger receives what is worth an operator's attention. Default:
	// slog.Default().
	Logger *slog.Logger
}

// Truncation says when partitions of the outbox are truncated. It happens only where
// dead rows make reads slow: a transaction that is open for long keeps vacuum from
// removing them, or vacuum does not keep up.
type Truncation uint8

const (
	// TruncateAuto leaves it to vacuum while a standby is connected, or a physical
	// replication slot exists. A standby that reads archived log without a slot is
	// not seen: set TruncateNever there.
	TruncateAuto Truncation = iota

	// TruncateAlways truncates whether or not there are standbys.
	TruncateAlways

	// TruncateNever leaves dead rows to vacuum. Reads become slower while a
	// transaction that is open for long keeps vacuum from removing them.
	TruncateNever
)

// Outbox is the write side of an outbox, and by [Outbox.Queue] its read side.
// It holds no connection and no goroutine; it may be used by many goroutines.
type Outbox struct {
	db    *sql.DB
	cfg   Config
	store store
	calls *bounded.Calls // of RunInTx

	inserts *inserts

	commits signal // of this process; Notifiers pass them on
	wake    signal // those, and what a Listener hears; relays read
}

// New returns an outbox on db. It does no I/O; the tables are made by
// oncemill.Migrate with [Migrations]. All bad values of cfg are reported at
// once, each as an [*oncemill.ConfigError]. The caller keeps owning db.
func New(db *sql.DB, cfg Config) (*Outbox, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "outbox.Config." + field, Value: value, Problem: problem})
	}
	if db == nil {
		return nil, &oncemill.ConfigError{Field: "outbox.New db", Value: "nil", Problem: "a database is needed"}
	}
	database, err := cfg.Database.Resolve(db)
	if err != nil {
		errs = append(errs, err)
	}
	cfg.Database = database
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
	return &Outbox{db: db, cfg: cfg, store: newStore(db, cfg), calls: bounded.New(mostAbandoned), inserts: newInserts(cfg.Database)}, nil
}

// RunInTx runs fn in a transaction of its own, with the transaction also in the
// context, commits, and wakes the relays of this process. An error of fn, or a
// panic, rolls back. A serialization failure or a deadlock, in fn or at the
// commit, runs fn again, so fn must have no other effects than those in the
// transaction; it must not commit or roll back itself.
//
// On SQLite it waits for its turn to write until ctx ends, and fn must be short: nobody
// else writes meanwhile. Its errors there are those of oncemill, see
// [oncemill.ErrNestedTx].
//
// If ctx ends before the commit, the transaction is rolled back. Once the COMMIT has
// been sent, RunInTx waits for its answer, for up to Config.CommitTimeout; the end of
// ctx does not cancel it, since PostgreSQL would then no longer wait for a synchronous
// standby. The error is [ErrCommitUnknown] if there is no answer. While a server is
// silent a statement of fn itself returns when its driver does, which with lib/pq may be
// long after ctx has ended.
func (o *Outbox) RunInTx(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	if o.cfg.Prepare {
		o.prepare(ctx)
	}
	for attempt := 0; ; attempt++ {
		err := o.runOnce(ctx, fn)
		if err == nil {
			o.Wake()
			return nil
		}
		if !sqlerr.Retryable(err) || errors.Is(err, ErrCommitUnknown) || errors.Is(err, oncemill.ErrDatabaseLocked) || attempt == o.cfg.Retries {
			return err
		}
		// The loser gives the winner time to finish; the spread keeps losers
		// from meeting again.
		wait := time.NewTimer(time.Duration(rand.Int64N(int64(time.Millisecond) << min(attempt, 7)))) //nolint:gosec // no secret
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return err
		}
	}
}

// prepare prepares what Publish executes. Without it Publish is slower and nothing else,
// so whatever is wrong is for the transaction to report.
func (o *Outbox) prepare(ctx context.Context) {
	_, _ = bounded.Do(ctx, o.calls, prepareLimit, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, o.inserts.prepare(ctx, o.db)
	})
}

func (o *Outbox) runOnce(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	tx, err := boundtx.Begin(ctx, o.db, o.cfg.Database.Dialect, o.calls, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	// A no-op after Commit; after an error or a panic of fn it is the rollback.
	defer tx.Rollback()
	within := oncemill.ContextWithTx(ctx, tx.Raw)
	if o.cfg.Prepare {
		within = context.WithValue(within, ownTx{o}, tx.Raw)
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

// Wake tells the relays of this process that something was committed. RunInTx
// does it; whoever commits a transaction in another way may do it, or leave it
// to the relay's next poll. It never blocks, and many calls become one wake-up.
// A [Notifier] passes it on to other processes.
func (o *Outbox) Wake() {
	o.wake.raise()
	o.commits.raise()
}

// Database returns the resolved configuration of the database, for the packages
// that keep tables beside the outbox.
func (o *Outbox) Database() oncemill.Config { return o.cfg.Database }

// Config returns the configuration with its defaults filled in, for the packages
// that keep tables beside the outbox.
func (o *Outbox) Config() Config { return o.cfg }

// DB returns the database that New was given.
func (o *Outbox) DB() *sql.DB { return o.db }
