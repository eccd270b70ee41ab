package inbox_test

import (
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestNew_ReportsEveryBadValueAndSendsNothing(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		elsewhere := oncemill.PostgreSQL
		if p.cfg.Dialect == elsewhere {
			elsewhere = oncemill.SQLite
		}
		other, err := outbox.New(p.db, outbox.Config{Database: oncemill.Config{Dialect: elsewhere}})
		if err != nil {
			t.Fatal(err)
		}
		database := p.cfg
		database.Prefix = "no good"
		_, err = inbox.New(p.db, inbox.Config{
			Consumer: "a\nb", Database: database, Outbox: other, Isolation: sql.LevelLinearizable, LockTimeout: -1,
		})
		want := []string{
			"inbox.Config.Consumer", "inbox.Config.Isolation", "inbox.Config.LockTimeout", "inbox.Config.Outbox", "oncemill.Config.Prefix",
		}
		if got := configFields(err); !slices.Equal(got, want) {
			t.Errorf("bad fields: got %v, want %v (%v)", got, want, err)
		}
		if sent := p.tap.sent(); len(sent) != 0 {
			t.Errorf("statements sent: %v", sent)
		}
	})
}

func configFields(err error) (fields []string) {
	var bad *oncemill.ConfigError
	switch joined := err.(type) { //nolint:errorlint // walks the tree itself
	case nil:
	case interface{ Unwrap() []error }:
		for _, e := range joined.Unwrap() {
			fields = append(fields, configFields(e)...)
		}
	default:
		if errors.As(err, &bad) {
			fields = append(fields, bad.Field)
		}
	}
	slices.Sort(fields)
	return fields
}

func TestNew_RefusesBadConsumersAndNoDatabase(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		for _, consumer := range []string{"", "a\x00", "\xff", strings.Repeat("c", 256)} {
			_, err := inbox.New(p.db, inbox.Config{Consumer: consumer, Database: p.cfg})
			if got := configFields(err); !slices.Equal(got, []string{"inbox.Config.Consumer"}) {
				t.Errorf("consumer %q: %v", consumer, err)
			}
		}
		_, err := inbox.New(nil, inbox.Config{Consumer: "stock"})
		var bad *oncemill.ConfigError
		if !errors.As(err, &bad) {
			t.Errorf("nil database: got %v", err)
		}
		if _, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg}); err != nil {
			t.Errorf("only a consumer: %v", err)
		}
		if sent := p.tap.sent(); len(sent) != 0 {
			t.Errorf("statements sent: %v", sent)
		}
	})
}

func TestNew_TakesOnlyIsolationAndLockTimeoutThatTheDatabaseHas(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		onPostgres := p.cfg.Dialect == oncemill.PostgreSQL
		for level, ok := range map[sql.IsolationLevel]bool{
			sql.LevelDefault: true, sql.LevelSerializable: true,
			sql.LevelReadCommitted: onPostgres, sql.LevelRepeatableRead: onPostgres,
			sql.LevelReadUncommitted: false, sql.LevelSnapshot: false, sql.LevelLinearizable: false,
		} {
			_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, Isolation: level})
			if (err == nil) != ok {
				t.Errorf("isolation %v: %v", level, err)
			}
		}
		for timeout, ok := range map[time.Duration]bool{
			0: true, time.Millisecond: onPostgres, time.Hour: onPostgres, time.Microsecond: false, time.Hour + 1: false, -time.Second: false,
		} {
			_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, LockTimeout: timeout})
			if (err == nil) != ok {
				t.Errorf("lock timeout %v: %v", timeout, err)
			}
		}
	})
}

func TestInbox_RefusesBadIDsAndSendsNothing(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		never := func(*message.Message) ([]*message.Message, error) {
			t.Error("the handler ran")
			return nil, nil
		}
		expectError(t, deliver(t, in, "", never), inbox.ErrNoMessageID)
		for _, id := range []string{strings.Repeat("x", 256), "a\x00b", "a\xffb"} {
			err := deliver(t, in, id, never)
			var bad *inbox.MessageIDError
			if !errors.As(err, &bad) || errors.Is(err, inbox.ErrNoMessageID) || len(err.Error()) > 200 {
				t.Errorf("id %q: got %v", id, err)
			}
		}
		if sent := p.tap.sent(); len(sent) != 0 {
			t.Errorf("statements sent: %v", sent)
		}
	})
}

func TestInbox_TakesTheIDFromConfig(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.ID = func(msg *message.Message) string { return msg.Metadata.Get("order") }
		})
		for _, uuid := range []string{"1", "2"} {
			msg := message.NewMessageWithContext(t.Context(), uuid, nil)
			msg.Metadata.Set("order", strings.Repeat("ü", 127))
			expectNoError(t, deliverMessage(t, in, msg, effect))
		}
		expectError(t, deliver(t, in, "uuid only", effect), inbox.ErrNoMessageID)
		p.expect(t, 1, 1, 0)
	})
}

func TestInbox_RunsAMessageOnceForEachConsumer(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		stock := p.inbox(t, nil)
		mail := p.inbox(t, func(cfg *inbox.Config) { cfg.Consumer = "mail" })
		for range 3 {
			expectNoError(t, deliver(t, stock, "a", effect))
			expectNoError(t, deliver(t, mail, "a", effect))
			expectNoError(t, deliver(t, stock, "b", effect))
		}
		p.expect(t, 3, 3, 0)
		if n := p.count(t, `select count(*) from {{inbox}} where received_at is not null`); n != 3 {
			t.Errorf("%d ids have a time", n)
		}
	})
}

// Begin, claim, seal, commit: what lib/pq with binary parameters and pgx need a
// round trip for each.
func TestInbox_AddsTwoStatementsToATransaction(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		last := "select"
		if p.cfg.Dialect == oncemill.SQLite {
			last = "update"
		}
		expectNoError(t, deliver(t, in, "a", effect))
		p.expectSent(t, "BEGIN", "insert", "insert", last, "COMMIT")
		expectNoError(t, deliver(t, in, "a", effect))
		p.expectSent(t, "BEGIN", "insert", "ROLLBACK")
	})
}

func TestInbox_FailedAttemptLeavesNothing(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		failure := errors.New("out of stock")
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage("b", nil)}, errors.Join(addEffect(msg), failure)
		})
		expectError(t, err, failure)
		p.expect(t, 0, 0, 0)
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}

func TestInbox_PanicIsRolledBackAndReported(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		failure := errors.New("unheard of")
		err := deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
			if err := addEffect(msg); err != nil {
				return nil, err
			}
			panic(failure)
		})
		var panicked *oncemill.PanicError
		if !errors.As(err, &panicked) || panicked.Value == nil || !strings.Contains(string(panicked.Stack), "inbox_test.go") {
			t.Errorf("got %v", err)
		}
		expectError(t, err, failure)
		p.expect(t, 0, 0, 0)
		if n := p.db.Stats().InUse; n != 0 {
			t.Errorf("%d connections in use", n)
		}
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}

func TestInbox_HandlerThatEndsItsGoroutineIsRolledBack(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = deliver(t, in, "a", func(msg *message.Message) ([]*message.Message, error) {
				expectNoError(t, addEffect(msg))
				runtime.Goexit()
				return nil, nil
			})
		}()
		<-ended
		if n := p.db.Stats().InUse; n != 0 {
			t.Errorf("%d connections in use", n)
		}
		p.expect(t, 0, 0, 0)
	})
}

// It leaves no message without an answer, which would hold up the messages behind it: neither
// its own nor, in a group, that of the member whose goroutine it ran in.
func TestInbox_HandlerThatEndsItsGoroutineLeavesNoMessageUnanswered(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Group.Wait = 100 * time.Millisecond })
		ctx := routed(t, "any", "results").Context()
		for name, once := range map[string]message.HandlerMiddleware{"alone": in.Middleware, "group": in.GroupMiddleware, "per handler": in.PerHandler} {
			h := once(func(msg *message.Message) ([]*message.Message, error) {
				if msg.Metadata.Get("ends") != "" {
					runtime.Goexit()
				}
				return effect(msg)
			})
			var messages []*message.Message
			var handling sync.WaitGroup
			for i := range 5 {
				msg := message.NewMessageWithContext(ctx, fmt.Sprint(name, i), nil)
				if i == 2 {
					msg.Metadata.Set("ends", "its goroutine")
				}
				messages = append(messages, msg)
				handling.Go(func() { // as a router does
					if _, err := h(msg); err != nil {
						msg.Nack()
					} else {
						msg.Ack()
					}
				})
			}
			handling.Wait()
			for i, msg := range messages {
				select {
				case <-msg.Acked():
				case <-msg.Nacked():
				case <-time.After(testserver.MaxWait / 10):
					t.Fatalf("%s: message %d is not answered", name, i)
				}
			}
		}
	})
}

// What a handler does to its message reaches neither the next attempt nor the dead letter
// nor the broker. If it acknowledges the message and fails, the message is not lost; if it
// nacks it and succeeds, the message does not come again.
func TestInbox_AHandlerGetsACopy(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, nil)
		spoil := func(answer func(*message.Message) bool, result error) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				if msg.Metadata.Get("about") != msg.UUID || string(msg.Payload) != "payload of "+msg.UUID {
					t.Errorf("an attempt gets %s, %q, %v", msg.UUID, msg.Payload, msg.Metadata)
				}
				err := addEffect(msg)
				answer(msg)
				msg.UUID, msg.Payload = "changed", nil
				msg.Metadata.Set("about", "changed")
				return nil, errors.Join(err, result)
			}
		}
		answered := func(msg *message.Message) bool {
			select {
			case <-msg.Acked():
			case <-msg.Nacked():
			default:
				return false
			}
			return true
		}
		nacked := from(t, "nacked", delivery{})
		expectNoError(t, deliverMessage(t, in, nacked, spoil((*message.Message).Nack, nil)))
		p.expect(t, 1, 1, 0)
		all := []*message.Message{nacked}
		for nacks := range 3 { // Retry.Deliveries
			acked := from(t, "acked", delivery{redelivered: nacks > 0, nacks: nacks})
			_ = deliverMessage(t, in, acked, spoil((*message.Message).Ack, errUndo))
			all = append(all, acked)
		}
		if slices.ContainsFunc(all, answered) {
			t.Error("a handler has answered the broker")
		}
		letter := dead.last()
		if letter.MessageID != "acked" || string(letter.Payload) != "payload of acked" || letter.Metadata["about"] != "acked" {
			t.Errorf("letter %+v", letter)
		}
	})
}
