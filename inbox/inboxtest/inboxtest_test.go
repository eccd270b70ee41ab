package inboxtest_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/inboxtest"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// recorder is a test that may fail.
type recorder struct {
	testing.TB
	failures []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

type testDB struct {
	db  *sql.DB
	box *outbox.Outbox
	in  *inbox.Inbox
}

func onEachDB(t *testing.T, test func(t *testing.T, p testDB)) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) { t.Parallel(); test(t, newTestDB(t, testserver.SQLite(t), oncemill.Config{})) })
	t.Run("postgresql", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		test(t, newTestDB(t, pg.DB, pg.Config))
	})
}

func newTestDB(t *testing.T, db *sql.DB, cfg oncemill.Config) testDB {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, cfg, outbox.Migrations, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), `create table effects (id text)`); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: cfg})
	if err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Database: cfg, Consumer: "stock", Outbox: box})
	if err != nil {
		t.Fatal(err)
	}
	return testDB{db, box, in}
}

func (p testDB) count(t *testing.T) (n int) {
	if err := p.db.QueryRowContext(t.Context(), `select count(*) from effects`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func newMessage() *message.Message { return message.NewMessage(watermill.NewUUID(), nil) }

// reserve has one effect and returns two messages.
func reserve(msg *message.Message) ([]*message.Message, error) {
	tx, _ := inbox.TxFromContext(msg.Context())
	_, err := tx.ExecContext(msg.Context(), `insert into effects values ($1)`, msg.UUID)
	first, second := newMessage(), newMessage()
	outbox.SetKey(first, msg.UUID)
	first.Metadata.Set("of", msg.UUID)
	return []*message.Message{first, second}, err
}

func TestRun_PassesAHandlerInTheTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p testDB) {
		scenarios := 0
		for _, middleware := range []message.HandlerMiddleware{p.in.Middleware, p.in.GroupMiddleware} {
			inboxtest.Run(t, inboxtest.Test{
				Middleware: middleware, Handler: reserve, NewMessage: newMessage, Topic: "reservations", Outbox: p.box,
				Effects: func() int { return p.count(t) },
				Produced: func(t testing.TB, of *message.Message, produced []inboxtest.Produced) {
					scenarios++
					if len(produced) != 2 || produced[0].Topic != "reservations" || produced[0].Key != of.UUID && produced[1].Key != of.UUID {
						t.Errorf("produced %+v for %s", produced, of.UUID)
					}
				},
			})
		}
		if n := p.count(t); n != 12 || scenarios != 12 {
			t.Errorf("%d effects, %d scenarios", n, scenarios)
		}
	})
}

// With dead letters, redelivered copies wait to be handled alone, but not for as long as a
// slow handler takes.
func TestRun_PassesASlowHandlerWithDeadLetters(t *testing.T) {
	t.Parallel()
	pg := testserver.Postgres(t)
	p := newTestDB(t, pg.DB, pg.Config)
	if err := oncemill.Migrate(t.Context(), pg.DB, pg.Config, audit.Migrations, dlq.Migrations); err != nil {
		t.Fatal(err)
	}
	letters, err := dlq.New(pg.DB, dlq.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Database: pg.Config, Consumer: "stock", Outbox: p.box, DeadLetters: letters, LockTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	slow := func(msg *message.Message) ([]*message.Message, error) {
		if msg.Metadata.Get("slow") != "" {
			time.Sleep(2 * time.Second)
		}
		return reserve(msg)
	}
	scenario := 0
	inboxtest.Run(t, inboxtest.Test{
		Middleware: in.Middleware, Handler: slow, NewMessage: func() *message.Message {
			msg := newMessage()
			if scenario++; scenario == 2 { // the copies
				msg.Metadata.Set("slow", "yes")
			}
			return msg
		}, Topic: "reservations", Outbox: p.box,
		Effects: func() int { return p.count(t) },
	})
}

func TestRun_FailsAHandlerBesideTheTransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p testDB) {
		beside := 0
		var mu sync.Mutex // copies run at once where nothing holds them back
		effect := func(*message.Message) ([]*message.Message, error) {
			mu.Lock()
			defer mu.Unlock()
			beside++
			return nil, nil
		}
		publish := func(*message.Message) ([]*message.Message, error) {
			return nil, p.box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				return p.box.Publish(ctx, tx, "beside", newMessage())
			})
		}
		noInbox := func(h message.HandlerFunc) message.HandlerFunc { return h }
		for name, c := range map[string]struct {
			test inboxtest.Test
			want int
		}{
			"an effect in memory": { // both crashes before the commit, and a COMMIT that was not sent
				inboxtest.Test{Middleware: p.in.Middleware, Handler: effect, NewMessage: newMessage, Effects: func() int { return beside }}, 2,
			},
			"no inbox": { // no scenario has one effect, and lost commits are not noticed
				inboxtest.Test{Middleware: noInbox, Handler: effect, NewMessage: newMessage, Effects: func() int { return beside }}, 8,
			},
			"nothing to check": {inboxtest.Test{Middleware: noInbox, Handler: effect, NewMessage: newMessage}, 1},
			"nothing to test":  {inboxtest.Test{Effects: func() int { return beside }}, 1},
		} {
			r := &recorder{TB: t}
			inboxtest.Run(r, c.test)
			if len(r.failures) != c.want {
				t.Errorf("%s: failures: %q", name, r.failures)
			}
		}
		if p.box.Config().Database.Dialect == oncemill.SQLite {
			return // publish would wait for the handler's own transaction
		}
		r := &recorder{TB: t}
		inboxtest.Run(r, inboxtest.Test{Middleware: p.in.Middleware, Handler: publish, NewMessage: newMessage, Outbox: p.box})
		if len(r.failures) != 2 {
			t.Errorf("published beside the transaction: failures: %q", r.failures)
		}
	})
}
