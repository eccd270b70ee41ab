// Package work is what the processes of the crucible do: producers, relay workers and two hops
// of consumers. It uses the library as a service would, and writes down what it did.
package work

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "github.com/lib/pq"              // the driver "postgres"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/crucible/history"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/steer"
)

// Roles of processes.
const (
	RoleProducer = "producer"
	RoleRelay    = "relay"
	RoleLedger   = "ledger"   // the first hop
	RoleReceipts = "receipts" // the second hop
	RoleMigrate  = "migrate"  // ends when the tables are migrated as its library needs them
)

// Topics, which are fanout exchanges.
const (
	TopicTransfers = "transfers" // consumed by the ledger
	TopicReceipts  = "receipts"  // produced by the ledger, consumed by receipts
	TopicAudit     = "audit"     // only recorded
)

// Metadata of the messages.
const (
	metaSeq     = "seq"     // number of the message within its key
	metaAttempt = "attempt" // of the handler that produced it
	metaMood    = "mood"    // what the handler has to suffer
	metaFrom    = "from"
	metaTo      = "to"
	metaAmount  = "amount"
)

// Job is the task of one process, passed as JSON in an environment variable.
type Job struct {
	Role, Name     string
	Life           int
	Postgres, AMQP string   // URLs, through proxies
	MoreAMQP       []string // URLs of the other nodes of a cluster, whose queues are quorum queues
	Seed           uint64
	Dir            string        // of the histories
	Rate           float64       // transactions a second, of a producer
	Accounts       int           // of the bank
	Lease          time.Duration // of relays
	Listen         string        // address of a service
	Rival          string        // "" for oncemill
	Driver         string        // of the database
}

// Drivers of PostgreSQL.
const (
	DriverPq  = "postgres"
	DriverPgx = "pgx"
)

// Variable is the name of the environment variable with the job.
const Variable = "ONCEMILL_CRUCIBLE_JOB"

// Schemas of the database.
const (
	AppSchema  = "app"
	MillSchema = "mill"
)

// Database is where the tables of the library are.
var Database = oncemill.Config{Schema: MillSchema}

// worker is a running process.
type worker struct {
	Job
	db      *sql.DB
	history *history.Writer
	log     *slog.Logger
	rand    *rand.Rand
}

// named reports whether the process promises that no other has its name while it runs. One of
// two does, so that both ways to go on after a crash are tested.
func (w *worker) named() bool { return strings.HasSuffix(w.Name, "-2") }

// Run does a job until the process is asked to stop, or its parent has gone.
func Run(text string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	w := &worker{log: slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	if err := json.Unmarshal([]byte(text), &w.Job); err != nil {
		return err
	}
	if w.Role == RoleMigrate {
		return migrate(ctx, w.Postgres)
	}
	go func() { // ends with the process: a read of standard input cannot be canceled
		for moments := bufio.NewScanner(os.Stdin); moments.Scan(); {
			crashpoint.Arm(moments.Text())
		}
		os.Exit(3) // the parent has gone
	}()
	signal.Ignore(os.Interrupt) // the parent's affair
	w.rand = rand.New(rand.NewPCG(w.Seed, uint64(w.Life)))
	if w.history, err = history.Create(w.Dir, w.Name); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.history.Close()) }()
	if w.db, err = open(w.Driver, w.Postgres, fmt.Sprintf("%s/%d", w.Name, w.Life)); err != nil {
		return err
	}
	defer w.db.Close() //nolint:errcheck // lib/pq says goodbye, perhaps to a server that is gone
	parts := []func(context.Context) error{w.measure, func(ctx context.Context) error { return w.history.WatchClock(ctx, w.Name) }}
	if w.Rival != "" {
		return w.runRival(ctx, parts)
	}
	cfg := mill.Config{Database: Database, NoMigrate: true, Logger: w.log, StopTimeout: 10 * time.Second}
	switch w.Role {
	case RoleProducer:
		err = w.configureProducer(&cfg)
	case RoleRelay:
		err = w.configureRelay(&cfg)
	case RoleLedger:
		w.configureLedger(&cfg)
	case RoleService:
		w.configureService(&cfg)
	case RoleReceipts:
		w.configureReceipts(&cfg)
	default:
		err = fmt.Errorf("unknown role %q", w.Role)
	}
	if err != nil {
		return err
	}
	m, err := mill.New(w.db, cfg)
	if err != nil {
		return err
	}
	switch w.Role {
	case RoleService:
		parts = append(parts, w.server(m))
	case RoleProducer:
		parts = append(parts, func(ctx context.Context) error { return w.produce(ctx, m.Outbox()) })
	}
	parts = append(parts, func(ctx context.Context) error { return w.ready(ctx, m) })
	return m.Run(ctx, parts...)
}

func migrate(ctx context.Context, dsn string) (err error) {
	db, err := open(DriverPq, dsn, RoleMigrate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return Migrate(ctx, db)
}

// Migrate creates the tables of the library, or migrates them to what this build needs.
func Migrate(ctx context.Context, db *sql.DB) error {
	return oncemill.Migrate(ctx, db, Database, outbox.Migrations, relay.Migrations, audit.Migrations, steer.Migrations, dlq.Migrations, inbox.Migrations, idempotency.Migrations)
}

// open returns a pool of the business schema.
func open(driver, dsn, name string) (*sql.DB, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, errors.New("the URL of PostgreSQL cannot be parsed") // the cause would show the password
	}
	query := u.Query()
	query.Set("search_path", AppSchema)
	query.Set("application_name", name)
	if driver == DriverPq {
		query.Set("binary_parameters", "yes")
	}
	// A frozen host accepts connections and never answers: the next address waits for this.
	query.Set("connect_timeout", "2")
	u.RawQuery = query.Encode()
	db, err := sql.Open(driver, u.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(poolSize)
	db.SetMaxIdleConns(poolSize)
	return db, nil
}

const poolSize = 16

func (w *worker) ready(ctx context.Context, m *mill.Mill) error {
	for m.Ready() != nil {
		if !sleep.For(ctx, 20*time.Millisecond) {
			return nil
		}
	}
	return w.announce()
}

// announce tells the parent that the process works.
func (w *worker) announce() error {
	if err := w.history.Add(history.Record{Event: history.EventReady}); err != nil {
		return err
	}
	_, err := fmt.Println("ready")
	return err
}

// measure writes down what the process uses, every two seconds.
func (w *worker) measure(ctx context.Context) error {
	for sleep.For(ctx, 2*time.Second) {
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return err
		}
		err = w.history.Add(history.Record{Event: history.EventResources, Resources: &history.Resources{
			Goroutines: runtime.NumGoroutine(), Heap: int64(memory.HeapInuse), Files: len(files),
		}})
		if err != nil {
			return err
		}
	}
	return nil
}
