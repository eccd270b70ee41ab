package inboxtest_test

import (
	"database/sql"
	"fmt"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/inbox/inboxtest"
	"github.com/oncemill/oncemill/internal/testserver"
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

func place(t *testing.T) (*sql.DB, *inbox.Inbox) {
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, inbox.Migrations); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), `create table effects (id text)`); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(db, inbox.Config{Consumer: "stock"})
	if err != nil {
		t.Fatal(err)
	}
	return db, in
}

func count(t *testing.T, db *sql.DB) (n int) {
	if err := db.QueryRowContext(t.Context(), `select count(*) from effects`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func newMessage() *message.Message { return message.NewMessage(watermill.NewUUID(), nil) }

func TestOneEffect_PassesAHandlerInTheTransaction(t *testing.T) {
	t.Parallel()
	db, in := place(t)
	for _, middleware := range []message.HandlerMiddleware{in.Middleware, in.GroupMiddleware} {
		inboxtest.OneEffect(t, middleware, func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := inbox.TxFromContext(msg.Context())
			_, err := tx.ExecContext(msg.Context(), `insert into effects values ($1)`, msg.UUID)
			return nil, err
		}, newMessage, func() int { return count(t, db) })
	}
	if n := count(t, db); n != 8 {
		t.Errorf("%d effects", n)
	}
}

func TestOneEffect_FailsAHandlerBesideTheTransaction(t *testing.T) {
	t.Parallel()
	_, in := place(t)
	effects := 0
	r := &recorder{TB: t}
	inboxtest.OneEffect(r, in.Middleware, func(*message.Message) ([]*message.Message, error) {
		effects++
		return nil, nil
	}, newMessage, func() int { return effects })
	if len(r.failures) != 1 {
		t.Errorf("failures: %q", r.failures)
	}
	r = &recorder{TB: t}
	noInbox := func(h message.HandlerFunc) message.HandlerFunc { return h }
	inboxtest.OneEffect(r, noInbox, func(*message.Message) ([]*message.Message, error) { return nil, nil }, newMessage, func() int { return 0 })
	if len(r.failures) != 4 {
		t.Errorf("failures: %q", r.failures)
	}
}
