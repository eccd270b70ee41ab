package relay_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// intakeEnv holds the intakeSpec of a process that runs an intake.
const intakeEnv = "ONCEMILL_TEST_RELAY_INTAKE"

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
	in, err := relay.FromForwarder(box, relay.ForwarderConfig{
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

// watermill-sql waits for all transactions of the whole server, so these tests
// have one to themselves.
func TestWatermillSQL(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	t.Run("together", func(t *testing.T) {
		for name, test := range map[string]func(*testing.T, *testserver.PostgresServer){
			"IsASink": watermillSQLIsASink,
			"IntakeMovesEachEnvelopeOnceThroughKills": intakeMovesEachEnvelopeOnceThroughKills,
			"IntakeSharesTheTableWithAForwarder":      intakeSharesTheTableWithAForwarder,
			"IntakeRefusesAGroupThatNobodyKnows":      intakeRefusesAGroupThatNobodyKnows,
			"IntakeStopsAtWhatCannotBeMoved":          intakeStopsAtWhatCannotBeMoved,
			"IntakeGivesKeys":                         intakeGivesKeys,
			"IntakeEndsWhileTheServerIsSilent":        intakeEndsWhileTheServerIsSilent,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, server)
			})
		}
	})
	t.Run("IntakeRidesOutARestart", func(t *testing.T) { intakeRidesOutARestart(t, server) })
}

// schemaOn is a place in a schema of its own on a server.
func schemaOn(t *testing.T, server *testserver.PostgresServer) place {
	t.Helper()
	name := "app_" + strings.ToLower(rand.Text()[:16])
	if _, err := server.Open().ExecContext(t.Context(), "create schema "+name); err != nil {
		t.Fatal(err)
	}
	path := "search_path=" + name
	open := func(testing.TB, ...string) *sql.DB { return server.Open(path) }
	return migrated(t, place{
		db: open(t), cfg: oncemill.Config{Dialect: oncemill.PostgreSQL, Schema: "mill_" + name},
		driver: testserver.DriverName(), dsn: server.DSN() + "&" + path, open: open,
	})
}

// oldWay is a service that publishes through Watermill's forwarder.
type oldWay struct {
	place
	box *outbox.Outbox
}

func onOldWay(t *testing.T, server *testserver.PostgresServer) *oldWay {
	t.Helper()
	p := schemaOn(t, server)
	old := &oldWay{place: p, box: p.box(t)}
	schema := watermillsql.DefaultPostgreSQLSchema{}
	offsets := watermillsql.DefaultPostgreSQLOffsetsAdapter{}
	queries := slices.Concat(schema.SchemaInitializingQueries("forwarder_topic"), offsets.SchemaInitializingQueries("forwarder_topic"),
		offsets.BeforeSubscribingQueries("forwarder_topic", "old"))
	for _, q := range queries {
		if _, err := p.db.ExecContext(t.Context(), q.Query, q.Args...); err != nil {
			t.Fatal(err)
		}
	}
	return old
}

// publish writes messages through the forwarder's publisher, in tx.
func (o *oldWay) publish(tx *sql.Tx, topic string, msgs ...*message.Message) error {
	publisher, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}, nil)
	if err != nil {
		return err
	}
	return forwarder.NewPublisher(publisher, forwarder.PublisherConfig{}).Publish(topic, msgs...)
}

func (o *oldWay) commit(t *testing.T, topic string, msgs ...*message.Message) {
	t.Helper()
	if err := o.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error { return o.publish(tx, topic, msgs...) }); err != nil {
		t.Fatal(err)
	}
}

// commitRaw writes a message without an envelope, as a mistaken producer does.
func (o *oldWay) commitRaw(t *testing.T, id, payload string) {
	t.Helper()
	q, err := watermillsql.DefaultPostgreSQLSchema{}.InsertQuery("forwarder_topic", message.Messages{message.NewMessage(id, []byte(payload))})
	if err != nil {
		t.Fatal(err)
	}
	o.execute(t, q.Query, q.Args...)
}

// intake starts an intake in this process. stop ends it and returns its error.
func (o *oldWay) intake(t *testing.T, cfg relay.ForwarderConfig) (stop func() error) {
	t.Helper()
	if cfg.ConsumerGroup == "" {
		cfg.ConsumerGroup = "old"
	}
	cfg.Poll, cfg.Logger = time.Millisecond, quiet
	in, err := relay.FromForwarder(o.box, cfg)
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
func (o *oldWay) fails(t *testing.T, cfg relay.ForwarderConfig) error {
	t.Helper()
	cfg.Poll, cfg.Logger = time.Millisecond, quiet
	in, err := relay.FromForwarder(o.box, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := in.Run(ctx); err != nil {
		return err
	}
	t.Fatal("the intake did not fail")
	return nil
}

// forward starts Watermill's own forwarder.
func (o *oldWay) forward(t *testing.T, to message.Publisher) (stop func()) {
	t.Helper()
	subscriber, err := watermillsql.NewSubscriber(o.db, watermillsql.SubscriberConfig{
		SchemaAdapter:  watermillsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 20},
		OffsetsAdapter: watermillsql.DefaultPostgreSQLOffsetsAdapter{},
		ConsumerGroup:  "old", PollInterval: time.Millisecond, RetryInterval: time.Millisecond,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := forwarder.NewForwarder(subscriber, to, watermill.NopLogger{}, forwarder.Config{})
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
func (p place) list(t *testing.T, query string) (all []string) {
	t.Helper()
	rows, err := p.db.QueryContext(t.Context(), p.cfg.Expand(query))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// written returns the ids of what producers have committed, in the order in which
// a forwarder takes it, and taken those of what is in the outbox, in its order.
func (o *oldWay) written(t *testing.T) []string {
	return o.list(t, `select payload ->> 'uuid' from watermill_forwarder_topic order by transaction_id, "offset"`)
}

func (o *oldWay) taken(t *testing.T) []string {
	return o.list(t, `select message_id from {{outbox}} order by id`)
}

// left counts what the group's offset has not passed, as
// docs/migrate-from-forwarder.md says it.
func (o *oldWay) left(t *testing.T, group string) int {
	t.Helper()
	return o.count(t, `select count(*) from watermill_forwarder_topic m, watermill_offsets_forwarder_topic o
		where o.consumer_group = $1 and (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)`, group)
}

// produce lets producers write to a few topics, with rollbacks and transactions
// that end late, until stop.
func (o *oldWay) produce(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for producer := range 4 {
		rng := mathrand.New(mathrand.NewPCG(uint64(producer), 7))
		group.Go(func() {
			for n := 0; ctx.Err() == nil; {
				tx, err := o.db.BeginTx(t.Context(), nil)
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
					if err := o.publish(tx, topic, m); err != nil {
						t.Error(err)
					}
					n++
					if rng.IntN(20) == 0 {
						time.Sleep(3 * time.Millisecond)
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

// Producers write all the time. The forwarder goes; an intake takes its place, is
// killed again and again, in its transaction or between two, and started anew. The
// relay delivers what it has moved.
func intakeMovesEachEnvelopeOnceThroughKills(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	var mu sync.Mutex
	var forwarded []string
	stopProducing := o.produce(t)
	stopForwarder := o.forward(t, publisherFunc(func(_ string, m *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		forwarded = append(forwarded, m.UUID)
		return nil
	}))
	eventually(t, "the forwarder has forwarded", func() bool { mu.Lock(); defer mu.Unlock(); return len(forwarded) > 100 })
	stopForwarder()
	// What it had sent and not acknowledged when it was stopped is sent again: its
	// own repeats, a batch at most.
	settled := o.count(t, `select count(*) from watermill_forwarder_topic m, watermill_offsets_forwarder_topic o
		where (m.transaction_id, m."offset") <= (o.last_processed_transaction_id, o.offset_acked)`)

	text, err := json.Marshal(intakeSpec{DSN: o.dsn, Database: o.cfg, Batch: 40})
	if err != nil {
		t.Fatal(err)
	}
	kills, least := 0, 2000
	if os.Getenv("ONCEMILL_LONG") != "" {
		least = 50_000
	}
	// Longer than a process takes to begin, shorter than it takes to be done.
	for life := 40 * time.Millisecond; len(o.taken(t)) < least || kills < 15; kills++ {
		cmd := exec.Command(os.Args[0])
		var stderr bytes.Buffer
		cmd.Env, cmd.Stderr = append(os.Environ(), intakeEnv+"="+string(text)), &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(life + mathrand.N(life))
		if err := cmd.Process.Kill(); err != nil {
			t.Fatalf("the intake has ended by itself: %s", stderr.String())
		}
		_ = cmd.Wait() // "signal: killed"
		if stderr.Len() > 0 {
			t.Fatalf("intake: %s", stderr.String())
		}
		life += life / 10
	}
	stopProducing()
	want := o.written(t)
	stop := o.intake(t, relay.ForwarderConfig{})
	eventually(t, "all is taken in", func() bool { return o.left(t, "old") == 0 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	got := o.taken(t)
	if !slices.Equal(forwarded, want[:len(forwarded)]) || len(forwarded) < settled || settled == 0 || !slices.Equal(got, want[settled:]) {
		t.Errorf("%d forwarded, %d of them settled, %d taken in, %d written: not the same, or not in the same order", len(forwarded), settled, len(got), len(want))
	}
	if slices.ContainsFunc(got, func(id string) bool { return strings.HasPrefix(id, "gone") }) {
		t.Error("what was rolled back was taken in")
	}
	t.Logf("%d kills, %d forwarded, %d taken in", kills, len(forwarded), len(got))

	var delivered []string
	start(t, o.box, relay.FromPublisher(publisherFunc(func(topic string, m *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		var n int
		if _, err := fmt.Sscanf(m.UUID[strings.LastIndex(m.UUID, "-")+1:], "%d", &n); err != nil {
			t.Error(err)
		}
		if want := fmt.Sprintf("payload of %d %s", n, topic); string(m.Payload) != want || m.Metadata.Get("colour") != topic {
			t.Errorf("%s in %s: payload %q, metadata %v", m.UUID, topic, m.Payload, m.Metadata)
		}
		delivered = append(delivered, topic+" "+m.UUID)
		return nil
	})), unhurried)
	o.awaitNothingOwed(t)
	mu.Lock()
	defer mu.Unlock()
	if len(delivered) != len(got) {
		t.Errorf("%d delivered, %d taken in", len(delivered), len(got))
	}
	for _, topic := range []string{"topic0", "topic1", "topic2"} {
		var of []string
		for _, s := range delivered {
			if id, ok := strings.CutPrefix(s, topic+" "); ok {
				of = append(of, id)
			}
		}
		in := slices.DeleteFunc(slices.Clone(got), func(id string) bool { return !slices.Contains(of, id) })
		if len(of) == 0 || !slices.Equal(of, in) {
			t.Errorf("%s: %d delivered, not in order", topic, len(of))
		}
	}
}

// While both run, each envelope goes one of the two ways, once.
func intakeSharesTheTableWithAForwarder(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	var mu sync.Mutex
	var forwarded []string
	stopProducing := o.produce(t)
	stopForwarder := o.forward(t, publisherFunc(func(_ string, m *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		forwarded = append(forwarded, m.UUID)
		return nil
	}))
	stopIntake := o.intake(t, relay.ForwarderConfig{})
	second := o.intake(t, relay.ForwarderConfig{})
	eventually(t, "both have worked", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(forwarded) > 100 && len(o.taken(t)) > 100
	})
	stopProducing()
	want := o.written(t)
	eventually(t, "all has gone a way", func() bool { return o.left(t, "old") == 0 })
	stopForwarder()
	if err := errors.Join(stopIntake(), second()); err != nil {
		t.Error(err)
	}
	got := slices.Concat(forwarded, o.taken(t))
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d forwarded, %d taken in, %d written: not the same", len(forwarded), len(got)-len(forwarded), len(want))
	}
}

func intakeRefusesAGroupThatNobodyKnows(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	o.commit(t, "orders", unkeyed(3)...)
	if err := o.fails(t, relay.ForwarderConfig{ConsumerGroup: "odl"}); !errors.Is(err, relay.ErrNoConsumerGroup) {
		t.Errorf("got %v", err)
	}
	if err := o.fails(t, relay.ForwarderConfig{Topic: "nothing_there"}); err == nil || !strings.Contains(err.Error(), "watermill_offsets_nothing_there") {
		t.Errorf("a table that is missing: %v", err)
	}
	if n := o.owed(t); n != 0 {
		t.Errorf("%d taken in", n)
	}
	stop := o.intake(t, relay.ForwarderConfig{ConsumerGroup: "new", FromStart: true})
	eventually(t, "all is taken in", func() bool { return o.owed(t) == 3 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if old, now := o.left(t, "old"), o.left(t, "new"); old != 3 || now != 0 {
		t.Errorf("left: %d of the old group, %d of the new one", old, now)
	}
}

func intakeStopsAtWhatCannotBeMoved(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	good := func(id string) *message.Message { return message.NewMessage(id, []byte("p")) }
	tooLong := strings.Repeat("x", 256)
	o.commit(t, "orders", good("1"), good("2"))
	o.commit(t, "stock", good("3"))
	o.commitRaw(t, "raw", `["no envelope"]`)
	o.commit(t, "orders", good("4"), good(tooLong), good("5"))
	o.commitRaw(t, "topicless", `{"uuid":"x","payload":null,"metadata":null}`)
	o.commit(t, tooLong, good("6"))
	o.commit(t, "orders", good("7"))

	var bad *relay.EnvelopeError
	if err := o.fails(t, relay.ForwarderConfig{ConsumerGroup: "old"}); !errors.As(err, &bad) || bad.MessageID != "raw" || bad.Topic != "forwarder_topic" || bad.Offset == 0 {
		t.Errorf("got %v", err)
	}
	if got := strings.Join(o.taken(t), " "); got != "1 2 3" {
		t.Errorf("taken in: %s", got)
	}
	// A Reject that fails changes nothing.
	cause := errors.New("no")
	err := o.fails(t, relay.ForwarderConfig{ConsumerGroup: "old", Reject: func(ctx context.Context, tx *sql.Tx, _ *message.Message, _ error) error {
		_, err := tx.ExecContext(ctx, `create table lost ()`)
		return errors.Join(cause, err)
	}})
	if !errors.Is(err, cause) || !errors.As(err, &bad) {
		t.Errorf("got %v", err)
	}
	if got := strings.Join(o.taken(t), " "); got != "1 2 3" {
		t.Errorf("taken in: %s", got)
	}
	o.execute(t, `create table rejected (id text, payload bytea)`)
	var problems []string
	stop := o.intake(t, relay.ForwarderConfig{Reject: func(ctx context.Context, tx *sql.Tx, envelope *message.Message, cause error) error {
		field := "envelope"
		if refused := (*outbox.MessageError)(nil); errors.As(cause, &refused) {
			field = refused.Field
		}
		problems = append(problems, field)
		_, err := tx.ExecContext(ctx, `insert into rejected values ($1, $2)`, envelope.UUID, []byte(envelope.Payload))
		return err
	}})
	eventually(t, "the rest is taken in", func() bool { return o.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(o.taken(t), " "); got != "1 2 3 4 5 7" {
		t.Errorf("taken in: %s", got)
	}
	if got := strings.Join(problems, " "); got != "envelope id envelope topic" {
		t.Errorf("rejected: %s", got)
	}
	if n := o.count(t, `select count(*) from rejected`); n != 4 {
		t.Errorf("%d kept, want 4", n)
	}
}

func intakeGivesKeys(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	write := func() {
		m := message.NewMessage("with", nil)
		outbox.SetKey(m, "own")
		m.Metadata.Set("customer", "7")
		o.commit(t, "orders", message.NewMessage("without", nil), m)
	}
	keys := func(want string, cfg relay.ForwarderConfig) {
		t.Helper()
		o.execute(t, `truncate {{outbox}}`)
		write()
		stop := o.intake(t, cfg)
		eventually(t, "all is taken in", func() bool { return o.owed(t) == 2 })
		if err := stop(); err != nil {
			t.Error(err)
		}
		if got := strings.Join(o.list(t, `select message_id || '=' || coalesce(key, '') from {{outbox}} order by id`), " "); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	keys("without=orders with=own", relay.ForwarderConfig{})
	keys("without= with=7", relay.ForwarderConfig{Key: func(_ string, m *message.Message) string { return m.Metadata.Get("customer") }})
}

// Run returns although a statement has no answer, and the next one goes on.
func intakeEndsWhileTheServerIsSilent(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	proxy, db := o.behindProxy(t)
	behind := *o
	behind.box = o.boxOn(t, db, outbox.NoHistory)
	stop := behind.intake(t, relay.ForwarderConfig{})
	o.commit(t, "orders", unkeyed(3)...)
	eventually(t, "the first are taken in", func() bool { return o.owed(t) == 3 })
	proxy.SilenceAll()
	eventually(t, "a connection is silenced", func() bool { return proxy.Silenced() > 0 })
	o.commit(t, "orders", unkeyed(3)...)
	if err := stop(); err != nil {
		t.Error(err)
	}
	proxy.Resume()
	stop = behind.intake(t, relay.ForwarderConfig{})
	eventually(t, "the others are taken in", func() bool { return o.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A database that is away costs time only.
func intakeRidesOutARestart(t *testing.T, server *testserver.PostgresServer) {
	o := onOldWay(t, server)
	stop := o.intake(t, relay.ForwarderConfig{})
	o.commit(t, "orders", unkeyed(3)...)
	eventually(t, "the first are taken in", func() bool { return o.owed(t) == 3 })
	server.Crash()
	server.Start()
	eventually(t, "the server answers", func() bool { return o.db.PingContext(t.Context()) == nil })
	o.commit(t, "orders", unkeyed(3)...)
	eventually(t, "the others are taken in", func() bool { return o.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestFromForwarder_ReportsAllBadValuesAtOnce(t *testing.T) {
	t.Parallel()
	lite := onSQLite(t)
	_, err := relay.FromForwarder(lite.box(t), relay.ForwarderConfig{Topic: `a"b`, Poll: -1})
	var got []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var bad *oncemill.ConfigError
		if errors.As(e, &bad) {
			got = append(got, bad.Field)
		}
	}
	if want := "relay.FromForwarder box relay.ForwarderConfig.Topic relay.ForwarderConfig.Poll"; strings.Join(got, " ") != want {
		t.Errorf("got %v", got)
	}
	if _, err := relay.FromForwarder(nil, relay.ForwarderConfig{}); err == nil {
		t.Error("an intake without an outbox was made")
	}
}
