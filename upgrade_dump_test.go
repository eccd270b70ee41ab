package oncemill_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/relaytest"
)

// A database that an older version has left in the middle of its work is migrated, and the
// work goes on: testdata/upgrade/README.md lists what it holds.
func TestUpgrade_ContinuesWorkOfAnOlderVersion(t *testing.T) {
	t.Parallel()
	for _, dump := range []string{"outbox3", "outbox5"} {
		t.Run(dump+"/postgresql", func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			script := strings.ReplaceAll(string(unzip(t, dump+".sql.gz")), "mill_upgrade_dump", pg.Config.Schema)
			if _, err := pg.DB.ExecContext(t.Context(), `drop schema if exists "`+pg.Config.Schema+`" cascade`); err != nil {
				t.Fatal(err)
			}
			if _, err := pg.DB.ExecContext(t.Context(), "set local check_function_bodies = false;\n"+script); err != nil {
				t.Fatal(err)
			}
			goOn(t, pg.DB, pg.Config)
		})
		t.Run(dump+"/sqlite", func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "old.db")
			if err := os.WriteFile(file, unzip(t, dump+".db.gz"), 0o600); err != nil {
				t.Fatal(err)
			}
			db, err := sql.Open("sqlite", oncemill.SQLiteDSN(file))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			goOn(t, db, oncemill.Config{})
		})
	}
}

func tableOf(t *testing.T, db *sql.DB, cfg oncemill.Config, name string) string {
	t.Helper()
	table, err := cfg.Table(db, name)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func unzip(t *testing.T, name string) []byte {
	t.Helper()
	packed, err := os.ReadFile(filepath.Join("testdata", "upgrade", name))
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func goOn(t *testing.T, db *sql.DB, cfg oncemill.Config) {
	t.Helper()
	for range 2 {
		if err := oncemill.Migrate(t.Context(), db, cfg, allSets...); err != nil {
			t.Fatal(err)
		}
	}
	letters, err := dlq.New(db, dlq.Config{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	byMessage := map[string]*dlq.Letter{}
	list, err := letters.List(t.Context(), dlq.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range list {
		byMessage[l.MessageID] = l
	}
	if len(list) != 4 || byMessage["held-1"] == nil || byMessage["held-1"].State != dlq.StateHeld || byMessage["dead-1"] == nil ||
		byMessage["refused-1"] == nil || byMessage["refused-2"] == nil || byMessage["refused-2"].State != dlq.StateReplaying {
		t.Fatalf("dead letters: %v", byMessage)
	}
	if _, err := letters.Replay(t.Context(), []int64{byMessage["held-1"].ID, byMessage["dead-1"].ID}, dlq.Act{By: "operator"}); err != nil {
		t.Fatal(err)
	}
	deliverOld(t, db, cfg)
	consumeOld(t, db, cfg, letters)
	answerOld(t, db, cfg)
}

// deliverOld expects everything that is owed, in order for each key.
func deliverOld(t *testing.T, db *sql.DB, cfg oncemill.Config) {
	t.Helper()
	box, err := outbox.New(db, outbox.Config{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	var sink relaytest.Sink
	worker, err := relay.New(box, &sink, relay.Config{Name: "new", PollMax: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	keys := map[string][]string{
		"a": {"owed-a1", "owed-a2", "owed-a3"}, "b": {"owed-b1", "owed-b2"}, "held-key": {"held-1", "held-2", "held-3"},
		"late-key": {"waiting-1", "waiting-2"}, "": {"dead-1", "owed-1", "soon-1", "waiting-3"},
	}
	messages, err := sink.Wait(t.Context(), 14)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, m := range messages {
		got[m.Key] = append(got[m.Key], m.MessageID)
		if m.Metadata.Get("name") != m.MessageID || string(m.Payload) != "payload of "+m.MessageID {
			t.Errorf("message %s came as %v, %q", m.MessageID, m.Metadata, m.Payload)
		}
	}
	slices.Sort(got[""])
	if fmt.Sprint(got) != fmt.Sprint(keys) {
		t.Errorf("delivered %v, want %v", got, keys)
	}
	for table, want := range map[string]int{"outbox": 0, "parked": 0, "scheduled": 1} {
		var n int
		if err := db.QueryRowContext(t.Context(), `select count(*) from `+tableOf(t, db, cfg, table)).Scan(&n); err != nil || n != want {
			t.Errorf("%s has %d rows (%v), want %d", table, n, err, want)
		}
	}
}

// consumeOld expects the consumer to know what it has handled, and to carry out the replay.
func consumeOld(t *testing.T, db *sql.DB, cfg oncemill.Config, letters *dlq.Store) {
	t.Helper()
	replays := &published{came: make(chan *message.Message, 10)}
	in, err := inbox.New(db, inbox.Config{
		Database: cfg, Consumer: "stock", DeadLetters: letters,
		Replays: &inbox.Replays{Publisher: replays, Topic: func(*dlq.Letter) string { return "stock" }},
	})
	if err != nil {
		t.Fatal(err)
	}
	var runs []string
	handle := in.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		runs = append(runs, msg.UUID)
		return nil, nil
	})
	deliver := func(msg *message.Message) {
		t.Helper()
		if _, err := handle(msg); err != nil {
			t.Errorf("%s: %v", msg.UUID, err)
		}
	}
	for _, id := range []string{"handled-1", "handled-2", "failing-1", "refused-1"} {
		deliver(message.NewMessage(id, []byte("payload of "+id)))
	}
	ctx, stop := context.WithCancel(t.Context())
	var background sync.WaitGroup
	background.Go(func() {
		if err := in.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	deliver(<-replays.came)
	stop()
	background.Wait()
	if want := []string{"failing-1", "refused-2"}; !slices.Equal(runs, want) {
		t.Errorf("handled %v, want %v", runs, want)
	}
	replayed, err := letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateReplayed}, Source: dlq.FromConsumer})
	if err != nil || len(replayed) != 1 || replayed[0].MessageID != "refused-2" {
		t.Errorf("replayed: %v, %v", replayed, err)
	}
}

type published struct{ came chan *message.Message }

func (p *published) Publish(_ string, messages ...*message.Message) error {
	for _, m := range messages {
		p.came <- m.Copy()
	}
	return nil
}

func (*published) Close() error { return nil }

// answerOld expects the stored answer, and a run of the command whose process was killed.
func answerOld(t *testing.T, db *sql.DB, cfg oncemill.Config) {
	t.Helper()
	// The answer was stored long ago: it would have expired.
	table, later := tableOf(t, db, cfg, "idempotency"), `clock_timestamp() + interval '1 hour'`
	if d, _ := oncemill.DialectOf(db); d == oncemill.SQLite {
		later = `(unixepoch() + 3600) * 1000000`
	}
	if _, err := db.ExecContext(t.Context(), `update `+table+` set expires_at = `+later+`, forget_at = `+later); err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, idempotency.Config{Scope: idempotency.SingleTenant()})
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]idempotency.Result[string]{
		"done": {Value: "the answer", Replayed: true}, "claimed": {Value: "a new answer"},
	} {
		got, err := idempotency.Do(t.Context(), engine, idempotency.Command{Name: "close", Key: key}, func(context.Context) (string, error) {
			return "a new answer", nil
		})
		if err != nil || got != want {
			t.Errorf("key %s: %+v, %v; want %+v", key, got, err, want)
		}
	}
}
