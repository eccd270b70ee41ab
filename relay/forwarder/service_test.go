package forwarder_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	theirs "github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/forwarder"
)

// The tests run intakes in processes of their own where these are to be killed: this
// binary, told by the environment to be one.
func TestMain(m *testing.M) {
	if spec := os.Getenv(intakeEnv); spec != "" {
		os.Exit(intakeMain(spec))
	}
	os.Exit(testserver.Main(m))
}

// intakeEnv holds the intakeSpec of a process that runs an intake.
const intakeEnv = "ONCEMILL_TEST_INTAKE"

type intakeSpec struct {
	DSN      string
	Database oncemill.Config
	Batch    int
}

func (s intakeSpec) run(ctx context.Context) error {
	db, err := sql.Open("postgres", s.DSN)
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	box, err := outbox.New(db, outbox.Config{Database: s.Database})
	if err != nil {
		return err
	}
	in, err := forwarder.New(box, forwarder.Config{
		ConsumerGroup: "old", Poll: time.Millisecond, Schema: watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: s.Batch},
	})
	if err != nil {
		return err
	}
	return errors.Join(in.Run(ctx), db.Close())
}

// intakeMain is a process with an intake, which is only ever killed.
func intakeMain(text string) int {
	var spec intakeSpec
	err := json.Unmarshal([]byte(text), &spec)
	if err == nil {
		err = spec.run(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// maxWait is how long a test waits before it fails.
const maxWait = testserver.MaxWait

var quiet = slog.New(slog.DiscardHandler)

// service publishes through Watermill's forwarder, and has an outbox in the same database.
type service struct {
	db  *sql.DB
	dsn string
	cfg oncemill.Config // resolved
	box *outbox.Outbox
}

// newService returns one in a schema of its own on a server.
func newService(t *testing.T, server *testserver.PostgresServer) *service {
	t.Helper()
	name := "app_" + strings.ToLower(rand.Text()[:16])
	if _, err := server.Open().ExecContext(t.Context(), "create schema "+name); err != nil {
		t.Fatal(err)
	}
	path := "search_path=" + name
	open := func() *sql.DB { return server.Open(path) }
	s := &service{db: open(), dsn: server.DSN() + "&" + path}
	cfg := oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "mill_" + name}
	if err := oncemill.Migrate(t.Context(), s.db, cfg, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	resolved, err := database.Resolve(s.db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.cfg = resolved.Config()
	s.box = s.boxOn(t, testserver.Pool(s.db, open))
	schema := watermillsql.DefaultPostgreSQLSchema{}
	offsets := watermillsql.DefaultPostgreSQLOffsetsAdapter{}
	queries := slices.Concat(schema.SchemaInitializingQueries("forwarder_topic"), offsets.SchemaInitializingQueries("forwarder_topic"),
		offsets.BeforeSubscribingQueries("forwarder_topic", "old"))
	for _, q := range queries {
		s.execute(t, q.Query, q.Args...)
	}
	return s
}

func (s *service) boxOn(t testing.TB, db *sql.DB) *outbox.Outbox {
	t.Helper()
	box, err := outbox.New(db, outbox.Config{Database: s.cfg, History: outbox.NoHistory, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	return box
}

func (s *service) execute(t testing.TB, statement string, args ...any) {
	t.Helper()
	if _, err := s.db.ExecContext(t.Context(), database.Of(s.cfg).Expand(statement), args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func (s *service) count(t testing.TB, query string, args ...any) (n int) {
	t.Helper()
	if err := s.db.QueryRowContext(t.Context(), database.Of(s.cfg).Expand(query), args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func (s *service) owed(t testing.TB) int {
	t.Helper()
	return s.count(t, `select count(*) from {{outbox}}`)
}

var eventually = testserver.Eventually

// publisherFunc is a Watermill publisher.
type publisherFunc func(topic string, msg *message.Message) error

func (f publisherFunc) Publish(topic string, messages ...*message.Message) error {
	for _, m := range messages {
		if err := f(topic, m); err != nil {
			return err
		}
	}
	return nil
}

func (publisherFunc) Close() error { return nil }

// some returns n messages.
func some(n int) []*message.Message {
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(watermill.NewUUID(), []byte("payload"))
	}
	return msgs
}

// publish writes messages through the forwarder's publisher, in tx.
func (s *service) publish(tx *sql.Tx, topic string, msgs ...*message.Message) error {
	publisher, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}, nil)
	if err != nil {
		return err
	}
	return theirs.NewPublisher(publisher, theirs.PublisherConfig{}).Publish(topic, msgs...)
}

func (s *service) commit(t *testing.T, topic string, msgs ...*message.Message) {
	t.Helper()
	if err := s.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error { return s.publish(tx, topic, msgs...) }); err != nil {
		t.Fatal(err)
	}
}

// commitRaw writes a message without an envelope, as a mistaken producer does.
func (s *service) commitRaw(t *testing.T, id, payload string) {
	t.Helper()
	q, err := watermillsql.DefaultPostgreSQLSchema{}.InsertQuery("forwarder_topic", message.Messages{message.NewMessage(id, []byte(payload))})
	if err != nil {
		t.Fatal(err)
	}
	s.execute(t, q.Query, q.Args...)
}

// intake starts an intake in this process. stop ends it and returns its error.
func (s *service) intake(t *testing.T, cfg forwarder.Config) (stop func() error) {
	t.Helper()
	if cfg.ConsumerGroup == "" {
		cfg.ConsumerGroup = "old"
	}
	cfg.Poll, cfg.Logger = time.Millisecond, quiet
	in, err := forwarder.New(s.box, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- in.Run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { _ = stop() })
	return stop
}

// fails returns the error that an intake ends with by itself.
func (s *service) fails(t *testing.T, cfg forwarder.Config) error {
	t.Helper()
	cfg.Poll, cfg.Logger = time.Millisecond, quiet
	in, err := forwarder.New(s.box, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	if err := in.Run(ctx); err != nil {
		return err
	}
	t.Fatal("the intake did not fail")
	return nil
}

// forward starts Watermill's own forwarder.
func (s *service) forward(t *testing.T, to message.Publisher) (stop func()) {
	t.Helper()
	subscriber, err := watermillsql.NewSubscriber(s.db, watermillsql.SubscriberConfig{
		SchemaAdapter:  watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 20},
		OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{},
		ConsumerGroup:  "old", PollInterval: time.Millisecond, RetryInterval: time.Millisecond,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := theirs.NewForwarder(subscriber, to, watermill.NopLogger{}, theirs.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.Run(context.WithoutCancel(t.Context())) }()
	<-f.Running()
	stop = sync.OnceFunc(func() {
		// It closes the subscriber, whose Close is not for two at once.
		if err := errors.Join(f.Close(), <-ended); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// list returns strings from the database.
func (s *service) list(t *testing.T, query string) []string {
	t.Helper()
	return testserver.Texts(t, s.db, database.Of(s.cfg).Expand(query))
}

// written returns the ids of what producers have committed, in the order in which
// a forwarder takes it, and taken those of what is in the outbox, in its order.
func (s *service) written(t *testing.T) []string {
	return s.list(t, `select payload ->> 'uuid' from watermill_forwarder_topic order by transaction_id, "offset"`)
}

func (s *service) taken(t *testing.T) []string {
	return s.list(t, `select message_id from {{outbox}} order by id`)
}

// left counts what the group's offset has not passed, as
// docs/migrate-from-forwarder.md says it.
func (s *service) left(t *testing.T, group string) int {
	t.Helper()
	return s.count(t, `select count(*) from watermill_forwarder_topic m, watermill_offsets_forwarder_topic o
		where o.consumer_group = $1 and (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)`, group)
}

// produce lets producers write to a few topics, with rollbacks and transactions
// that end late, until stop.
func (s *service) produce(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for producer := range 4 {
		rng := mathrand.New(mathrand.NewPCG(uint64(producer), 7))
		group.Go(func() {
			for n := 0; ctx.Err() == nil; {
				tx, err := s.db.BeginTx(t.Context(), nil)
				if err != nil {
					t.Error(err)
					return
				}
				keep := rng.IntN(5) > 0
				for range 1 + rng.IntN(4) {
					what := "gone"
					if keep {
						what = "kept"
					}
					topic := fmt.Sprint("topic", rng.IntN(3))
					m := message.NewMessage(fmt.Sprintf("%s-%d-%d", what, producer, n), fmt.Appendf(nil, "payload of %d %s", n, topic))
					m.Metadata.Set("colour", topic)
					if err := s.publish(tx, topic, m); err != nil {
						t.Error(err)
					}
					n++
					if rng.IntN(20) == 0 {
						testserver.Pause(t.Context(), 3*time.Millisecond)
					}
				}
				end := tx.Rollback
				if keep {
					end = tx.Commit
				}
				if err := end(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	stop = sync.OnceFunc(func() { cancel(); group.Wait() })
	t.Cleanup(stop)
	return stop
}
