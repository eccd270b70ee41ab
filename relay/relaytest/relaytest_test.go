package relaytest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
	"github.com/oncemill/oncemill/relay/relaytest"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func newBox(t *testing.T, db *sql.DB, database oncemill.Config) *outbox.Outbox {
	t.Helper()
	if err := oncemill.Migrate(t.Context(), db, database, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{Database: database})
	if err != nil {
		t.Fatal(err)
	}
	return box
}

func eachDatabase(t *testing.T, test func(t *testing.T, box *outbox.Outbox)) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := testserver.Postgres(t)
		pg.DB.SetMaxOpenConns(1)
		test(t, newBox(t, pg.DB, pg.Config))
	})
	t.Run("SQLite", func(t *testing.T) {
		t.Parallel()
		test(t, newBox(t, testserver.SQLite(t), oncemill.Config{}))
	})
}

func commit(t *testing.T, box *outbox.Outbox, topic string, ids ...string) {
	t.Helper()
	err := box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
		for _, id := range ids {
			m := message.NewMessage(id, []byte("payload of "+id))
			m.Metadata.Set("colour", "blue")
			outbox.SetKey(m, "key")
			if err := box.Publisher(tx).Publish(topic, m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func limited(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestDrain_DeliversAllThatIsOwed(t *testing.T) {
	eachDatabase(t, func(t *testing.T, box *outbox.Outbox) {
		sink := &relaytest.Sink{}
		var want []string
		for round := range 3 {
			var ids []string
			for i := range 10 {
				ids = append(ids, fmt.Sprintf("message%d%d", round, i))
			}
			commit(t, box, "orders", ids...)
			want = append(want, ids...)
			if err := relaytest.Drain(limited(t, time.Minute), box, sink); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, m := range sink.Messages() {
				got = append(got, m.MessageID)
				if m.Topic != "orders" || m.Key != "key" || string(m.Payload) != "payload of "+m.MessageID || m.Metadata.Get("colour") != "blue" || m.CreatedAt.IsZero() {
					t.Errorf("got %+v", m)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		if err := relaytest.Drain(limited(t, time.Minute), box, sink); err != nil {
			t.Errorf("nothing was owed: %v", err)
		}
		if n := sink.Attempts("message00"); n != 1 {
			t.Errorf("%d attempts", n)
		}
		sink.Reset()
		if len(sink.Messages()) != 0 || sink.Attempts("message00") != 0 {
			t.Error("Reset has forgotten nothing")
		}
	})
}

func TestDrain_FailsIfItCannotDeliver(t *testing.T) {
	eachDatabase(t, func(t *testing.T, box *outbox.Outbox) {
		sink := &relaytest.Sink{}
		sink.Fail("orders", relay.Unavailable(errors.New("away")))
		commit(t, box, "orders", "a")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			testserver.Poll(ctx, func() bool { return sink.Attempts("a") >= 2 })
			cancel()
		}()
		err := relaytest.Drain(ctx, box, sink)
		if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "left in the outbox") {
			t.Errorf("got %v", err)
		}
		if n := len(sink.Messages()); n != 0 {
			t.Errorf("%d messages", n)
		}
		sink.Fail("orders", nil)
		if err := relaytest.Drain(limited(t, time.Minute), box, sink); err != nil || len(sink.Messages()) != 1 {
			t.Errorf("%d messages, %v", len(sink.Messages()), err)
		}
	})
}

func TestDrain_PassesTheRelaysErrorOn(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	commit(t, box, "orders", "a")
	var schema *oncemill.SchemaError
	if err := relaytest.Drain(limited(t, time.Minute), box, &relaytest.Sink{}); !errors.As(err, &schema) {
		t.Errorf("got %v", err)
	}
}

func TestSink_FailsWhatItIsTold(t *testing.T) {
	t.Parallel()
	sink := &relaytest.Sink{}
	refused, away := relay.Refused(errors.New("too large")), relay.Unavailable(errors.New("away"))
	sink.Fail("stock", away)
	sink.FailMessage("b", refused)
	outcomes := func() (all []string) {
		for _, m := range []*relay.Message{{Topic: "orders", MessageID: "a"}, {Topic: "orders", MessageID: "b"}, {Topic: "stock", MessageID: "b"}, {Topic: "stock", MessageID: "c"}} {
			sink.Publish(t.Context(), []*relay.Message{m}, func(_ *relay.Message, err error) {
				switch {
				case err == nil:
					all = append(all, "confirmed")
				case errors.Is(err, relay.ErrRefused):
					all = append(all, "refused")
				case errors.Is(err, relay.ErrUnavailable):
					all = append(all, "unavailable")
				}
			})
		}
		return all
	}
	if got := strings.Join(outcomes(), " "); got != "confirmed refused refused unavailable" {
		t.Errorf("got %s", got)
	}
	sink.Fail("stock", nil)
	sink.FailMessage("b", nil)
	if got := strings.Join(outcomes(), " "); got != "confirmed confirmed confirmed confirmed" {
		t.Errorf("got %s", got)
	}
	if n := sink.Attempts("b"); n != 4 {
		t.Errorf("%d attempts", n)
	}
}

func TestSink_WaitsForMessages(t *testing.T) {
	t.Parallel()
	sink := &relaytest.Sink{}
	publish := func(id string) {
		sink.Publish(t.Context(), []*relay.Message{{MessageID: id}}, func(*relay.Message, error) {})
	}
	publish("a")
	if got, err := sink.Wait(limited(t, time.Minute), 1); err != nil || len(got) != 1 {
		t.Errorf("%d messages, %v", len(got), err)
	}
	waits := make(chan error, 2)
	for range cap(waits) {
		go func() {
			got, err := sink.Wait(limited(t, time.Minute), 3)
			if err == nil && len(got) != 3 {
				err = fmt.Errorf("%d messages", len(got))
			}
			waits <- err
		}()
	}
	publish("b")
	publish("c")
	for range cap(waits) {
		if err := <-waits; err != nil {
			t.Error(err)
		}
	}
	if got, err := sink.Wait(limited(t, time.Millisecond), 4); !errors.Is(err, context.DeadlineExceeded) || len(got) != 3 {
		t.Errorf("%d messages, %v", len(got), err)
	}
}
