package forwarder_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/forwarder"
	"github.com/oncemill/oncemill/relay/relaytest"
)

// watermill-sql waits for all transactions of the whole server, so these tests
// have one to themselves.
func TestIntake(t *testing.T) {
	t.Parallel()
	server := testserver.PrivatePostgres(t)
	t.Run("together", func(t *testing.T) {
		for name, test := range map[string]func(*testing.T, *testserver.PostgresServer){
			"MovesEachEnvelopeOnceThroughKills": movesEachEnvelopeOnceThroughKills,
			"SharesTheTableWithAForwarder":      sharesTheTableWithAForwarder,
			"RefusesAGroupThatNobodyKnows":      refusesAGroupThatNobodyKnows,
			"StopsAtWhatCannotBeMoved":          stopsAtWhatCannotBeMoved,
			"GivesKeys":                         givesKeys,
			"EndsWhileTheServerIsSilent":        endsWhileTheServerIsSilent,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, server)
			})
		}
	})
	t.Run("RidesOutARestart", func(t *testing.T) { ridesOutARestart(t, server) })
}

// Producers write all the time. The forwarder goes; an intake takes its place, is
// killed again and again, in its transaction or between two, and started anew. The
// relay delivers what it has moved.
func movesEachEnvelopeOnceThroughKills(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	var mu sync.Mutex
	var forwarded []string
	stopProducing := s.produce(t)
	stopForwarder := s.forward(t, publisherFunc(func(_ string, m *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		forwarded = append(forwarded, m.UUID)
		return nil
	}))
	eventually(t, "the forwarder has forwarded", func() bool { mu.Lock(); defer mu.Unlock(); return len(forwarded) > 100 })
	stopForwarder()
	// What it had sent and not acknowledged when it was stopped is sent again: its
	// own repeats, a batch at most.
	settled := s.count(t, `select count(*) from watermill_forwarder_topic m, watermill_offsets_forwarder_topic o
		where (m.transaction_id, m."offset") <= (o.last_processed_transaction_id, o.offset_acked)`)

	text, err := json.Marshal(intakeSpec{DSN: s.dsn, Database: s.cfg, Batch: 40})
	if err != nil {
		t.Fatal(err)
	}
	kills, least, most := 0, testserver.Rounds(1000, 50_000), testserver.Rounds(10, 15)
	// Longer than a process takes to begin, shorter than it takes to be done.
	for life := 40 * time.Millisecond; len(s.taken(t)) < least || kills < most; kills++ {
		cmd := exec.Command(os.Args[0])
		var stderr bytes.Buffer
		cmd.Env, cmd.Stderr = append(os.Environ(), intakeEnv+"="+string(text)), &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		testserver.Pause(t.Context(), life+mathrand.N(life))
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
	want := s.written(t)
	stop := s.intake(t, forwarder.Config{})
	eventually(t, "all is taken in", func() bool { return s.left(t, "old") == 0 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	got := s.taken(t)
	if !slices.Equal(forwarded, want[:len(forwarded)]) || len(forwarded) < settled || settled == 0 || !slices.Equal(got, want[settled:]) {
		t.Errorf("%d forwarded, %d of them settled, %d taken in, %d written: not the same, or not in the same order", len(forwarded), settled, len(got), len(want))
	}
	if slices.ContainsFunc(got, func(id string) bool { return strings.HasPrefix(id, "gone") }) {
		t.Error("what was rolled back was taken in")
	}
	t.Logf("%d kills, %d forwarded, %d taken in", kills, len(forwarded), len(got))

	var delivered []string
	err = relaytest.Drain(t.Context(), s.box, relay.FromPublisher(publisherFunc(func(topic string, m *message.Message) error {
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
	})))
	if err != nil {
		t.Fatal(err)
	}
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
func sharesTheTableWithAForwarder(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	var mu sync.Mutex
	var forwarded []string
	stopProducing := s.produce(t)
	stopForwarder := s.forward(t, publisherFunc(func(_ string, m *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		forwarded = append(forwarded, m.UUID)
		return nil
	}))
	stopIntake := s.intake(t, forwarder.Config{})
	second := s.intake(t, forwarder.Config{})
	eventually(t, "both have worked", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(forwarded) > 100 && len(s.taken(t)) > 100
	})
	stopProducing()
	want := s.written(t)
	eventually(t, "all has gone a way", func() bool { return s.left(t, "old") == 0 })
	stopForwarder()
	if err := errors.Join(stopIntake(), second()); err != nil {
		t.Error(err)
	}
	got := slices.Concat(forwarded, s.taken(t))
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d forwarded, %d taken in, %d written: not the same", len(forwarded), len(got)-len(forwarded), len(want))
	}
}

func refusesAGroupThatNobodyKnows(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	s.commit(t, "orders", some(3)...)
	if err := s.fails(t, forwarder.Config{ConsumerGroup: "odl"}); !errors.Is(err, forwarder.ErrNoConsumerGroup) {
		t.Errorf("got %v", err)
	}
	if err := s.fails(t, forwarder.Config{Topic: "nothing_there"}); err == nil || !strings.Contains(err.Error(), "watermill_offsets_nothing_there") {
		t.Errorf("a table that is missing: %v", err)
	}
	if n := s.owed(t); n != 0 {
		t.Errorf("%d taken in", n)
	}
	stop := s.intake(t, forwarder.Config{ConsumerGroup: "new", FromStart: true})
	eventually(t, "all is taken in", func() bool { return s.owed(t) == 3 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if old, now := s.left(t, "old"), s.left(t, "new"); old != 3 || now != 0 {
		t.Errorf("left: %d of the old group, %d of the new one", old, now)
	}
}

func stopsAtWhatCannotBeMoved(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	good := func(id string) *message.Message { return message.NewMessage(id, []byte("p")) }
	tooLong := strings.Repeat("x", 256)
	s.commit(t, "orders", good("1"), good("2"))
	s.commit(t, "stock", good("3"))
	s.commitRaw(t, "raw", `["no envelope"]`)
	s.commit(t, "orders", good("4"), good(tooLong), good("5"))
	s.commitRaw(t, "topicless", `{"uuid":"x","payload":null,"metadata":null}`)
	s.commit(t, tooLong, good("6"))
	s.commit(t, "orders", good("7"))

	var bad *forwarder.EnvelopeError
	if err := s.fails(t, forwarder.Config{ConsumerGroup: "old"}); !errors.As(err, &bad) || bad.MessageID != "raw" || bad.Topic != "forwarder_topic" || bad.Offset == 0 {
		t.Errorf("got %v", err)
	}
	if got := strings.Join(s.taken(t), " "); got != "1 2 3" {
		t.Errorf("taken in: %s", got)
	}
	// A Reject that fails changes nothing.
	cause := errors.New("no")
	err := s.fails(t, forwarder.Config{ConsumerGroup: "old", Reject: func(ctx context.Context, tx *sql.Tx, _ *message.Message, _ error) error {
		_, err := tx.ExecContext(ctx, `create table lost ()`)
		return errors.Join(cause, err)
	}})
	if !errors.Is(err, cause) || !errors.As(err, &bad) {
		t.Errorf("got %v", err)
	}
	if got := strings.Join(s.taken(t), " "); got != "1 2 3" {
		t.Errorf("taken in: %s", got)
	}
	s.execute(t, `create table rejected (id text, payload bytea)`)
	var problems []string
	stop := s.intake(t, forwarder.Config{Reject: func(ctx context.Context, tx *sql.Tx, envelope *message.Message, cause error) error {
		field := "envelope"
		if refused := (*outbox.MessageError)(nil); errors.As(cause, &refused) {
			field = refused.Field
		}
		problems = append(problems, field)
		_, err := tx.ExecContext(ctx, `insert into rejected values ($1, $2)`, envelope.UUID, []byte(envelope.Payload))
		return err
	}})
	eventually(t, "the rest is taken in", func() bool { return s.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(s.taken(t), " "); got != "1 2 3 4 5 7" {
		t.Errorf("taken in: %s", got)
	}
	if got := strings.Join(problems, " "); got != "envelope id envelope topic" {
		t.Errorf("rejected: %s", got)
	}
	if n := s.count(t, `select count(*) from rejected`); n != 4 {
		t.Errorf("%d kept, want 4", n)
	}
}

func givesKeys(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	write := func() {
		m := message.NewMessage("with", nil)
		outbox.SetKey(m, "own")
		m.Metadata.Set("customer", "7")
		s.commit(t, "orders", message.NewMessage("without", nil), m)
	}
	keys := func(want string, cfg forwarder.Config) {
		t.Helper()
		s.execute(t, `truncate {{outbox}}`)
		write()
		stop := s.intake(t, cfg)
		eventually(t, "all is taken in", func() bool { return s.owed(t) == 2 })
		if err := stop(); err != nil {
			t.Error(err)
		}
		if got := strings.Join(s.list(t, `select message_id || '=' || coalesce(key, '') from {{outbox}} order by id`), " "); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	keys("without=orders with=own", forwarder.Config{})
	keys("without= with=7", forwarder.Config{Key: func(_ string, m *message.Message) string { return m.Metadata.Get("customer") }})
}

// Run returns although a statement has no answer, and the next one goes on.
func endsWhileTheServerIsSilent(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	proxy, db := testserver.OpenSilenceable(t, s.dsn)
	behind := *s
	behind.box = s.boxOn(t, db)
	stop := behind.intake(t, forwarder.Config{})
	s.commit(t, "orders", some(3)...)
	eventually(t, "the first are taken in", func() bool { return s.owed(t) == 3 })
	proxy.SilenceAll()
	eventually(t, "a connection is silenced", func() bool { return proxy.Silenced() > 0 })
	s.commit(t, "orders", some(3)...)
	if err := stop(); err != nil {
		t.Error(err)
	}
	proxy.Resume()
	stop = behind.intake(t, forwarder.Config{})
	eventually(t, "the others are taken in", func() bool { return s.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A database that is away costs time only.
func ridesOutARestart(t *testing.T, server *testserver.PostgresServer) {
	s := newService(t, server)
	stop := s.intake(t, forwarder.Config{})
	s.commit(t, "orders", some(3)...)
	eventually(t, "the first are taken in", func() bool { return s.owed(t) == 3 })
	server.Crash()
	server.Start()
	eventually(t, "the server answers", func() bool { return s.db.PingContext(t.Context()) == nil })
	s.commit(t, "orders", some(3)...)
	eventually(t, "the others are taken in", func() bool { return s.owed(t) == 6 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestNew_ReportsAllBadValuesAtOnce(t *testing.T) {
	t.Parallel()
	box, err := outbox.New(testserver.OpenSQLite(t, filepath.Join(t.TempDir(), "test.db")), outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = forwarder.New(box, forwarder.Config{Topic: `a"b`, Poll: -1})
	var got []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		var bad *oncemill.ConfigError
		if errors.As(e, &bad) {
			got = append(got, bad.Field)
		}
	}
	if want := "forwarder.New box forwarder.Config.Topic forwarder.Config.Poll"; strings.Join(got, " ") != want {
		t.Errorf("got %v", got)
	}
	if _, err := forwarder.New(nil, forwarder.Config{}); err == nil {
		t.Error("an intake without an outbox was made")
	}
}
