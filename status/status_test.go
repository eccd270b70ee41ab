package status_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/status"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func each(t *testing.T, test func(t *testing.T, db *sql.DB, cfg oncemill.Config)) {
	t.Helper()
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		test(t, pg.DB, pg.Config)
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, testserver.SQLite(t), oncemill.Config{})
	})
}

func read(t *testing.T, db *sql.DB, cfg status.Config) *status.Status {
	t.Helper()
	reader, err := status.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	s, err := reader.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func publish(t *testing.T, box *outbox.Outbox, n int) {
	t.Helper()
	err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		for range n {
			if err := box.Publish(ctx, tx, "orders", message.NewMessage(watermill.NewUUID(), nil)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Parts without tables are left out. With them, the status tells what waits and what is wrong.
func TestRead_TellsWhatWaitsAndWhatIsWrong(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		s := read(t, db, status.Config{Database: cfg})
		if s.Outbox != nil || s.Relay != nil || s.DeadLetters != nil || s.Keys != nil {
			t.Errorf("without tables: %+v", s)
		}
		expect(t, s, "None of the tables exist")
		if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations, idempotency.Migrations); err != nil {
			t.Fatal(err)
		}
		s = read(t, db, status.Config{Database: cfg})
		if s.Outbox.Depth.N != 0 || s.Outbox.Depth.AtLeast || len(s.Relay.Workers) != 0 || len(s.Relay.Unowned) != outbox.Lanes || len(s.Problems()) != 0 {
			t.Errorf("empty: %+v, %+v, %q", s.Outbox, s.Relay, s.Problems())
		}
		box, err := outbox.New(db, outbox.Config{Database: cfg})
		if err != nil {
			t.Fatal(err)
		}
		publish(t, box, 40)
		s = read(t, db, status.Config{Database: cfg})
		if s.Outbox.Depth.N != 40 || s.Outbox.Depth.String() != "40" || s.Outbox.Oldest < 0 {
			t.Errorf("40 messages: %+v", s.Outbox)
		}
		expect(t, s, "No relay is running")

		// A count ends at the limit and says so.
		s = read(t, db, status.Config{Database: cfg, Limit: 32})
		if n := s.Outbox.Depth; !n.AtLeast && !n.Estimate {
			t.Errorf("up to 32: %+v", n)
		}

		ago := `clock_timestamp() - interval '5 minutes'`
		if database.Of(box.Config().Database).Dialect == oncemill.SQLite {
			ago = `created_at - 300000000`
		}
		if _, err := db.ExecContext(t.Context(), database.Of(box.Config().Database).Expand(`update {{outbox}} set created_at = `+ago)); err != nil {
			t.Fatal(err)
		}
		expect(t, read(t, db, status.Config{Database: cfg}), "A message has waited for 5m")

		sink := relay.FromPublisher(refusing{})
		worker, err := relay.New(box, sink, relay.Config{Name: "one", Retry: relay.Retry{MaxAttempts: 1}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- worker.Run(ctx) }()
		testserver.Eventually(t, "the letters are dead", func() bool {
			s = read(t, db, status.Config{Database: cfg})
			return s.DeadLetters.Total.N == 40
		})
		if len(s.Relay.Workers) != 1 || s.Relay.Workers[0].Name != "one" || !s.Relay.Workers[0].Ready || s.Relay.Workers[0].Gone != 0 {
			t.Errorf("one worker: %+v", s.Relay)
		}
		if open := s.DeadLetters.Open; len(open) != 1 || open[0].Source != dlq.FromRelay || open[0].State != dlq.StateDead || open[0].Count.N != 40 {
			t.Errorf("dead letters: %+v", s.DeadLetters)
		}
		expect(t, s, "40 dead letters")
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}

		text, err := json.Marshal(s)
		if err != nil || !strings.Contains(string(text), `"Oldest":`) || strings.Contains(string(text), "null") {
			t.Errorf("%s, %v", text, err)
		}
	})
}

// A replay that nobody carries out is a problem after a minute, whoever should do it.
func TestRead_TellsOfReplaysThatNobodyCarriesOut(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, cfg oncemill.Config) {
		if err := oncemill.Migrate(t.Context(), db, cfg, audit.Migrations, dlq.Migrations); err != nil {
			t.Fatal(err)
		}
		letters, err := dlq.New(db, dlq.Config{Database: cfg})
		if err != nil {
			t.Fatal(err)
		}
		where := database.Of(letters.Config().Database)
		exec := func(text string) {
			t.Helper()
			if _, err := db.ExecContext(t.Context(), where.Expand(text)); err != nil {
				t.Fatal(err)
			}
		}
		created := `clock_timestamp()`
		before := `interval '1 second' * `
		if where.Dialect == oncemill.SQLite {
			created, before = `1`, `1000000 * `
		}
		for i, origin := range []string{"'consumer', 'mail\x1b', null, null, null", "'consumer', 'stock', null, null, null", "'relay', '', 1, 2, " + created} {
			exec(`insert into {{dead_letters}} (id, source, consumer, lane, row_id, created_at, topic, message_id, payload, reason, error, fingerprint) values (` + strconv.Itoa(i+1) + `, ` + origin + `, 'orders', 'm', '', 'failed', '', 'f')`)
		}
		act := dlq.Act{By: "ada", Reason: "fixed"}
		if accepted, err := letters.Replay(t.Context(), []int64{1, 3}, act); err != nil || len(accepted) != 2 {
			t.Fatalf("%v, %v", accepted, err)
		}
		exec(`update {{dead_letters}} set acted_at = acted_at - ` + before + `50`)
		s := read(t, db, status.Config{Database: cfg})
		if problems := s.Problems(); len(problems) != 1 || problems[0] != "1 dead letters wait for a decision." || len(s.DeadLetters.Stuck) != 0 {
			t.Errorf("after 50 seconds: %q", problems)
		}
		exec(`update {{dead_letters}} set acted_at = acted_at - ` + before + `20`)
		s = read(t, db, status.Config{Database: cfg})
		if len(s.DeadLetters.Stuck) != 2 {
			t.Errorf("after 70 seconds: %+v", s.DeadLetters)
		}
		expect(t, s, `1 dead letters of consumer "mail\x1b" have waited to be replayed for 1m1`)
		expect(t, s, `no inbox with Config.Replays runs`)
		expect(t, s, `1 dead letters of the relay have waited to be replayed for 1m1`)
		exec(`update {{dead_letters}} set state = 'held', held = true where id = 3`)
		if err := letters.Discard(t.Context(), 3, act); err != nil {
			t.Fatal(err)
		}
		exec(`update {{dead_letters}} set acted_at = acted_at - ` + before + `120 where id = 3`)
		expect(t, read(t, db, status.Config{Database: cfg}), `1 dead letters of the relay have waited to be discarded for 2m`)
		stuck, err := letters.Stuck(t.Context())
		if err != nil || len(stuck) != 2 || stuck[0].Count != 1 || stuck[0].Oldest < dlq.StuckAfter {
			t.Errorf("%+v, %v", stuck, err)
		}
	})
}

func expect(t *testing.T, s *status.Status, problem string) {
	t.Helper()
	if all := s.Problems(); !slices.ContainsFunc(all, func(p string) bool { return strings.Contains(p, problem) }) {
		t.Errorf("problems %q, want %q", all, problem)
	}
}

// refusing is a publisher that refuses everything.
type refusing struct{}

func (refusing) Publish(string, ...*message.Message) error {
	return relay.Refused(errors.New("not to my liking"))
}
func (refusing) Close() error { return nil }

// A lock on the tables of one part hides that part only, and a silent server hangs nobody.
func TestReader_WaitsForNobody(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, outbox.Migrations, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	lock, err := pg.DB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback() //nolint:errcheck // a no-op after the one below
	if _, err := lock.ExecContext(t.Context(), database.Of(pg.Config).Expand(`lock table {{dead_letters}} in access exclusive mode`)); err != nil {
		t.Fatal(err)
	}
	s := read(t, pg.DB, status.Config{Database: pg.Config})
	if s.Outbox == nil || s.DeadLetters != nil || !slices.Equal(s.Silent, []string{"dead letters"}) {
		t.Errorf("with a locked table: %+v", s)
	}
	expect(t, s, "gives no answer about the dead letters")
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}

	proxy, db := testserver.OpenSilenceable(t, pg.DSN)
	reader, err := status.New(db, status.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	if s, err := reader.Read(t.Context()); err != nil || s.DeadLetters == nil || len(s.Silent) > 0 {
		t.Errorf("before: %+v, %v", s, err)
	}
	proxy.SilenceAll()
	for range 3 {
		if s, err := reader.Read(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a silent server: %+v, %v", s, err)
		}
	}
	proxy.Resume()
	testserver.Eventually(t, "it is read again", func() bool { _, err := reader.Read(t.Context()); return err == nil })
}

func TestProblems_QuoteWhatStrangersHaveChosen(t *testing.T) {
	t.Parallel()
	s := &status.Status{Keys: &status.Keys{Started: []status.Started{{Endpoint: "POST /\x1b[31m" + strings.Repeat("é", 100), Count: status.Count{N: 2}}}}}
	want := `2 requests have begun and their processes have ended: "POST /\x1b[31m` + strings.Repeat("é", 29) + `…".`
	if got := s.Problems(); len(got) != 1 || got[0] != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNew_RefusesBadLimits(t *testing.T) {
	t.Parallel()
	var bad *oncemill.ConfigError
	if _, err := status.New(testserver.SQLite(t), status.Config{Limit: -1}); !errors.As(err, &bad) {
		t.Errorf("got %v", err)
	}
}

func TestAge_IsShownInUnitsThatFit(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]string{
		1234 * time.Microsecond: "1ms", 61*time.Second + 300*time.Millisecond: "1m1s", 90 * time.Minute: "1.5h", 60 * time.Hour: "2.5d",
	} {
		if got := status.Age(age).String(); got != want {
			t.Errorf("%s: %s, want %s", age, got, want)
		}
	}
	if text, err := json.Marshal(status.Age(1500 * time.Millisecond)); err != nil || string(text) != "1.5" {
		t.Errorf("%s, %v", text, err)
	}
}
