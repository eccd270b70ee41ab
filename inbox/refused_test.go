package inbox_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
)

// topical is the delivery of a topic.
type topical struct {
	delivery
	topic string
}

func (d topical) Topic() string { return d.topic }

// refuseMany refuses messages of eight topics at the same time. On a slow machine some
// have waited too long, and come again.
func refuseMany(t *testing.T, in *inbox.Inbox, n int, done func(id string, err error)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			id := fmt.Sprint("m", i)
			ctx := inbox.ContextWithDelivery(t.Context(), topical{topic: fmt.Sprint("topic ", i%8)})
			err := in.Refuse(ctx, message.NewMessage(id, nil), errUndo)
			for end := time.Now().Add(testserver.MaxWait); waitedTooLong(err) && time.Now().Before(end); {
				err = in.Refuse(ctx, message.NewMessage(id, nil), errUndo)
			}
			done(id, err)
		})
	}
	all.Wait()
}

func waitedTooLong(err error) bool {
	return sqlerr.State(err) == "55P03" || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, driver.ErrBadConn) // idle in its transaction
}

// Counts of refused messages are locked in one order, so that processes do not wait for
// each other in a circle. SQLite has one writer at a time.
func TestRefused_CountsAreLockedInOneOrder(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"postgresql", "postgresql_text_repeatable_read"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testDBs[name](t)
			in := p.inbox(t, func(cfg *inbox.Config) {
				cfg.DeadLetters, cfg.Logger = p.letterStore(t), slog.New(slog.DiscardHandler)
			})
			refuseMany(t, in, 300, func(_ string, err error) { expectNoError(t, err) })
			// xmin is the transaction that wrote a letter.
			if n := p.count(t, `select count(*) from {{dead_letters}} a join {{dead_letters}} b on a.xmin = b.xmin and a.id < b.id and a.topic > b.topic`); n > 0 {
				t.Errorf("%d pairs were counted in another order", n)
			}
			if n := p.count(t, `select count(*) from {{dead_letters}} a join {{dead_letters}} b on a.xmin = b.xmin and a.topic < b.topic`); n == 0 {
				t.Error("no transaction has several topics")
			}
			if n := p.count(t, `select count(*) from {{dead_letters}}`); n != 300 {
				t.Errorf("%d letters", n)
			}
		})
	}
}

// A letter that cannot be written holds up none of those that were to be written with it.
func TestRefused_ALetterThatFailsFailsAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Logger = p.letterStore(t), slog.New(slog.DiscardHandler)
		})
		p.failLetters(t, "m150")
		refuseMany(t, in, 300, func(id string, err error) {
			if (err != nil) != (id == "m150") {
				t.Errorf("%s: %v", id, err)
			}
		})
	})
}

// A write of many fails because of one letter, and is made by halves; then the database goes
// away. Half of it is written, and stays; the messages of the other half are nacked, and
// leave a letter each when they come again. The counts agree.
func TestRefused_HalfOfAWriteStaysThoughTheOtherHalfFails(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		const messages = 300
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Logger = p.letterStore(t), slog.New(slog.DiscardHandler)
		})
		admit := p.failLetters(t, "m150")
		halves := false
		p.tap.sent()
		p.tap.committed = func(err error) error { // the tap is locked
			if !p.tap.away && slices.Contains(p.tap.statements, "ROLLBACK") {
				halves, p.tap.away = true, true
			}
			return err
		}
		var mu sync.Mutex
		var failed []string
		refuseMany(t, in, messages, func(id string, err error) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, id)
			}
		})
		p.tap.committed = nil
		p.tap.goAway(false)
		if !halves || !slices.Contains(failed, "m150") || len(failed) == 1 || len(failed) == messages {
			t.Fatalf("written by halves: %t; failed: %q", halves, failed)
		}
		counts := func() [3]int {
			return [...]int{
				p.count(t, `select count(*) from {{dead_letters}}`), p.count(t, `select count(distinct message_id) from {{dead_letters}}`),
				p.count(t, `select coalesce(sum(total), 0) from {{inbox_refused}}`),
			}
		}
		if n := messages - len(failed); counts() != [...]int{n, n, n} {
			t.Errorf("%d did not fail; letters, messages, refused: %v", n, counts())
		}
		admit()
		for _, id := range failed {
			expectNoError(t, in.Refuse(t.Context(), message.NewMessage(id, nil), errUndo))
		}
		if counts() != [...]int{messages, messages, messages} {
			t.Errorf("when they had come again: letters, messages, refused: %v", counts())
		}
	})
}

// One kind of warnings keeps no other out of the log.
func TestRefused_WarningsOfEachKindAreLogged(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var log lines
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Logger = p.letterStore(t), slog.New(slog.NewTextHandler(&log, nil))
		})
		for range 3 {
			expectNoError(t, in.Refuse(t.Context(), message.NewMessage("m", nil), errUndo))
			marked := message.NewMessageWithContext(t.Context(), "marked", nil)
			marked.Metadata.Set(inbox.ReplayMetadata, "yes")
			expectNoError(t, deliverMessage(t, in, marked, effect))
		}
		if log.count("messages refused") == 0 || log.count("not a replay of ours") == 0 {
			t.Errorf("logged:\n%s", log.text.String())
		}
	})
}

// What Verify cannot find out now is not held against the message.
func TestRefused_NotWhileVerifyIsUndecided(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var verify func(*message.Message) error
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Verify = func(msg *message.Message) error { return verify(msg) }
		})
		for _, undecided := range []error{inbox.Unavailable(errUndo), inbox.RetryAfter(errUndo, time.Second)} {
			verify = func(*message.Message) error { return fmt.Errorf("fetch keys: %w", undecided) }
			for nacks := range 30 {
				delayed := &atomic.Int64{}
				expectError(t, deliverMessage(t, in, from(t, "a", delivery{delayed: delayed, nacks: nacks}), effect), errUndo)
				if d := time.Duration(delayed.Load()); d < time.Second/2 {
					t.Errorf("comes again after %v", d)
				}
			}
		}
		verify = func(msg *message.Message) error { return msg.Context().Err() }
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		expectError(t, deliverMessage(t, in, message.NewMessageWithContext(ctx, "a", nil), effect), context.Canceled)
		p.expect(t, 0, 0, 0)
		p.expectNotes(t, 0, 0)
		expectNoError(t, deliverMessage(t, in, from(t, "a", delivery{}), effect))
		p.expect(t, 1, 1, 0)
		if len(dead.all()) > 0 {
			t.Errorf("letter %+v", dead.last())
		}
	})
}

// Messages that Config.Fingerprint panics at are genuine: each has its letter.
func TestRefused_NotForAPanicOfFingerprint(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.KeepRefused = 1
			cfg.Fingerprint = func(*message.Message) []byte { panic("no content") }
		})
		for i := range 3 {
			id := fmt.Sprint("m", i)
			for range 2 { // the second is a copy
				expectNoError(t, deliverMessage(t, in, from(t, id, delivery{}), effect))
			}
			if l := dead.last(); len(dead.all()) != i+1 || l.MessageID != id || l.Reason != string(inbox.ReasonPermanent) || l.Stack == "" {
				t.Errorf("%d letters, the last %+v", len(dead.all()), l)
			}
		}
		p.expect(t, 0, 3, 0)
	})
}

// A refusal that took too long says that its time is up, also though it was written in a group, whose context is
// canceled then: nobody canceled anything. One that fails in time says what the database said.
func TestRefused_SaysWhyItFailed(t *testing.T) {
	t.Parallel()
	p := postgres(t, "binary_parameters=yes")
	in := p.inbox(t, func(cfg *inbox.Config) { cfg.DeadLetters = p.letterStore(t) })
	resolved, err := database.Resolve(p.db, p.cfg)
	expectNoError(t, err)
	disturb := func(body string) {
		p.exec(t, `create or replace function disturb() returns trigger language plpgsql as $$ begin `+body+` end $$`)
	}
	refuse := func() error {
		return in.Refuse(inbox.ContextWithDelivery(t.Context(), topical{topic: "orders"}), message.NewMessage("a", nil), errUndo)
	}
	disturb(`perform pg_sleep(600); return new;`)
	p.exec(t, resolved.Expand(`create trigger disturb before insert on {{dead_letters}} for each row execute function disturb()`))
	err = refuse()
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), errUndo.Error()) {
		t.Errorf("the refusal that took too long: %v", err)
	}
	disturb(`raise exception 'no room';`)
	err = refuse()
	if errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no room") || !strings.Contains(err.Error(), errUndo.Error()) {
		t.Errorf("the refusal that failed: %v", err)
	}
}
