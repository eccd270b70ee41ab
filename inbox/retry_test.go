package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
)

// letters are the dead letters of a test.
type letters struct {
	*dlq.Store
	t *testing.T
}

// all returns them with their messages, the newest first.
func (l letters) all() []*dlq.Letter {
	l.t.Helper()
	list, err := l.List(l.t.Context(), dlq.Filter{})
	expectNoError(l.t, err)
	for i, head := range list {
		list[i], err = l.Get(l.t.Context(), head.ID)
		expectNoError(l.t, err)
	}
	return list
}

// last returns the newest letter, or an empty one if there is none.
func (l letters) last() *dlq.Letter {
	l.t.Helper()
	if all := l.all(); len(all) > 0 {
		return all[0]
	}
	return &dlq.Letter{}
}

// withDeadLetters returns an inbox with dead letters and short delays.
func (p *testDB) withDeadLetters(t *testing.T, change func(*inbox.Config)) (*inbox.Inbox, letters) {
	t.Helper()
	l := letters{p.letterStore(t), t}
	return p.inbox(t, func(cfg *inbox.Config) {
		cfg.DeadLetters = l.Store
		cfg.Retry = inbox.Retry{Tries: 2, Backoff: time.Millisecond, Deliveries: 3, Delay: time.Second, Crashes: 2}
		if change != nil {
			change(cfg)
		}
	}), l
}

// failLetters makes the database refuse the dead letters of a message until admit is
// called.
func (p *testDB) failLetters(t *testing.T, messageID string) (admit func()) {
	t.Helper()
	begin, end := `create function no_room() returns trigger language plpgsql as $$ begin raise 'no room'; end $$;
		create trigger no_room before insert on {{dead_letters}} for each row when (new.message_id = '`+messageID+`') execute function no_room()`,
		`drop function no_room cascade`
	if p.cfg.Dialect == oncemill.SQLite {
		begin, end = `create trigger no_room before insert on {{dead_letters}} when new.message_id = '`+messageID+`' begin select raise(abort, 'no room'); end`,
			`drop trigger no_room`
	}
	resolved, err := database.Resolve(p.db, p.cfg)
	expectNoError(t, err)
	p.exec(t, resolved.Expand(begin))
	return func() { p.exec(t, end) }
}

// expectNotes checks how many messages have notes and letters.
func (p *testDB) expectNotes(t *testing.T, notes, letters int) {
	t.Helper()
	gotNotes, gotLetters := p.count(t, `select count(*) from {{inbox_failures}}`), p.count(t, `select count(*) from {{dead_letters}}`)
	if gotNotes != notes || gotLetters != letters {
		t.Errorf("notes, letters: got %d, %d, want %d, %d", gotNotes, gotLetters, notes, letters)
	}
}

// from returns a message with what a subscriber tells of it.
func from(t *testing.T, id string, d delivery) *message.Message {
	msg := message.NewMessageWithContext(inbox.ContextWithDelivery(t.Context(), d), id, []byte("payload of "+id))
	msg.Metadata.Set("about", id)
	return msg
}

func TestRetry_TriesThenDelaysThenDeadLetters(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, nil)
		runs := 0
		delayed := &atomic.Int64{}
		fail := func(msg *message.Message) ([]*message.Message, error) {
			runs++
			return produceAnd(msg, fmt.Errorf("run %d: %w", runs, errUndo))
		}
		for n := 1; n <= 3; n++ {
			delayed.Store(0)
			err := deliverMessage(t, in, from(t, "a", delivery{delayed: delayed}), fail)
			if n < 3 {
				expectError(t, err, errUndo)
				p.expectNotes(t, 1, 0)
				if d, least := time.Duration(delayed.Load()), time.Second<<(n-1)/2; d < least || d > 3*least {
					t.Errorf("delivery %d comes again after %v", n, d)
				}
				continue
			}
			expectNoError(t, err)
		}
		p.expectNotes(t, 0, 1)
		letter := dead.last()
		if runs != 6 || letter.Reason != string(inbox.ReasonFailed) || letter.Tries != 3 || len(letter.Attempts) != 3 || letter.Error != "run 6: "+errUndo.Error() ||
			letter.Attempts[0].Error != "run 2: "+errUndo.Error() || letter.Attempts[0].At.IsZero() || string(letter.Payload) != "payload of a" ||
			letter.Metadata.Get("about") != "a" || letter.Consumer != "stock" || letter.MessageID != "a" {
			t.Errorf("%d runs, letter %+v", runs, letter)
		}
		// Its copies are duplicates.
		expectNoError(t, deliver(t, in, "a", fail))
		if runs != 6 {
			t.Error("the handler ran again")
		}
		p.expect(t, 0, 1, 0)
		p.expectNotes(t, 0, 1)
	})
}

// produceAnd leaves an effect and ends with an error.
func produceAnd(msg *message.Message, err error) ([]*message.Message, error) {
	return nil, errors.Join(addEffect(msg), err)
}

func TestRetry_SuccessAfterFailures(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, nil)
		runs := 0
		handler := func(msg *message.Message) ([]*message.Message, error) {
			if runs++; runs < 4 {
				return produceAnd(msg, errUndo)
			}
			return produceAnd(msg, nil)
		}
		expectError(t, deliver(t, in, "a", handler), errUndo)
		expectNoError(t, deliver(t, in, "a", handler))
		p.expect(t, 1, 1, 0)
		if _, err := in.Purge(t.Context()); err != nil {
			t.Error(err)
		}
		p.expectNotes(t, 0, 0)
	})
}

func TestRetry_FollowsTheMarkOfAnError(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Classify = func(err error) error {
				if strings.Contains(err.Error(), "classified") {
					return inbox.Permanent(err)
				}
				return err
			}
		})
		runs := 0
		failing := func(err error) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) { runs++; return nil, err }
		}
		expectNoError(t, deliver(t, in, "permanent", failing(fmt.Errorf("wrapped: %w", inbox.Permanent(errUndo)))))
		if letter := dead.last(); runs != 1 || letter.Reason != string(inbox.ReasonPermanent) || letter.Error != "wrapped: "+errUndo.Error() {
			t.Errorf("%d runs, letter %+v", runs, letter)
		}
		expectNoError(t, deliver(t, in, "classified", failing(errors.New("classified"))))
		if letter := dead.last(); runs != 2 || letter.MessageID != "classified" {
			t.Errorf("%d runs, letter %+v", runs, letter)
		}
		delayed := &atomic.Int64{}
		expectError(t, deliverMessage(t, in, from(t, "later", delivery{delayed: delayed}), failing(inbox.RetryAfter(errUndo, time.Hour))), errUndo)
		if d := time.Duration(delayed.Load()); runs != 3 || d != time.Hour {
			t.Errorf("%d runs, again after %v", runs, d)
		}
		expectNoError(t, deliver(t, in, "panics", func(*message.Message) ([]*message.Message, error) { panic(inbox.Permanent(errUndo)) }))
		if letter := dead.last(); !strings.Contains(letter.Stack, "retry_test.go") || strings.Contains(letter.Error, "goroutine") {
			t.Errorf("letter %+v", letter)
		}
		p.expectNotes(t, 1, 3)
		p.expect(t, 0, 3, 0)
		if inbox.Permanent(nil) != nil || inbox.Unavailable(nil) != nil || inbox.RetryAfter(nil, 1) != nil {
			t.Error("nil was marked")
		}
	})
}

func TestRetry_DeadLettersWhatCannotBeHandled(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Retention = time.Hour
			cfg.Fingerprint = func(msg *message.Message) []byte { return msg.Payload }
			cfg.Verify = func(msg *message.Message) error {
				if msg.Metadata.Get("forged") != "" {
					return errors.New("bad signature")
				}
				return nil
			}
		})
		known := from(t, "known", delivery{})
		expectNoError(t, deliverMessage(t, in, known, effect))
		expectNoError(t, deliverMessage(t, in, known, effect))
		never := func(*message.Message) ([]*message.Message, error) {
			t.Error("the handler ran")
			return nil, nil
		}
		other := from(t, "known", delivery{})
		other.Payload = []byte("other")
		forged := from(t, "forged", delivery{})
		forged.Metadata.Set("forged", "yes")
		for _, c := range []struct {
			msg    *message.Message
			reason inbox.Reason
		}{
			{from(t, "", delivery{}), inbox.ReasonNoMessageID},
			{from(t, "\xff\x00", delivery{}), inbox.ReasonNoMessageID},
			{other, inbox.ReasonConflict},
			{forged, inbox.ReasonUnverified},
			{from(t, "old", delivery{createdAt: time.Now().Add(-59 * time.Minute)}), inbox.ReasonTooOld},
		} {
			before := len(dead.all())
			expectNoError(t, deliverMessage(t, in, c.msg, never))
			if c.reason == inbox.ReasonConflict || c.reason == inbox.ReasonTooOld {
				expectNoError(t, deliverMessage(t, in, c.msg, never)) // a copy has no letter
			}
			if letter := dead.last(); letter.Reason != string(c.reason) || len(dead.all()) != before+1 {
				t.Errorf("%s: letter %+v", c.reason, letter)
			}
		}
		expectNoError(t, deliverMessage(t, in, from(t, "younger", delivery{createdAt: time.Now().Add(-40 * time.Minute)}), effect))
		p.expect(t, 2, 4, 0) // "known" and "younger", and of two letters: what is refused takes no id
		if got := p.count(t, `select count(*) from {{inbox}} where message_id in ('old', 'forged')`); got != 0 {
			t.Errorf("%d took their id", got)
		}
		expectNoError(t, in.Refuse(t.Context(), from(t, "garbage", delivery{}), errUndo))
		if letter := dead.last(); letter.Reason != string(inbox.ReasonMalformed) {
			t.Errorf("letter %+v", letter)
		}
		expectError(t, p.inbox(t, nil).Refuse(t.Context(), known, errUndo), inbox.ErrNoDeadLetters)
	})
}

func TestRetry_LetterAndIDCommitTogether(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, nil)
		admit := p.failLetters(t, "a")
		fail := func(*message.Message) ([]*message.Message, error) { return nil, inbox.Permanent(errUndo) }
		if err := deliver(t, in, "a", fail); err == nil || !strings.Contains(err.Error(), "dead letter: add: ") {
			t.Errorf("without a letter: %v", err)
		}
		p.expect(t, 0, 0, 0)
		admit()
		expectNoError(t, deliver(t, in, "a", fail))
		p.expect(t, 0, 1, 0)
		p.expectNotes(t, 0, 1)
	})
}

// A message that ends the process is found by the starts that have no end. Here
// the goroutine ends in its stead.
func TestRetry_CountsCrashesOfRedeliveredMessages(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, nil)
		crashes := 0
		crash := func() {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = deliverMessage(t, in, from(t, "a", delivery{redelivered: crashes > 0}), func(*message.Message) ([]*message.Message, error) {
					crashes++
					runtime.Goexit()
					return nil, nil
				})
			}()
			<-ended
		}
		// The first is not marked, the second not alone, two are charged.
		for range 4 {
			crash()
		}
		p.expectNotes(t, 1, 0)
		// An innocent that was in flight with it, and was delivered again.
		expectNoError(t, deliverMessage(t, in, from(t, "b", delivery{redelivered: true}), effect))
		p.expectNotes(t, 1, 0)
		expectNoError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true}), effect))
		if letter := dead.last(); crashes != 4 || letter.Reason != string(inbox.ReasonCrashed) {
			t.Errorf("%d crashes, letter %+v", crashes, letter)
		}
		p.expect(t, 1, 2, 0)
		p.expectNotes(t, 0, 1)
	})
}

// Redeliveries whose attempts end, whatever way, are no crashes.
func TestRetry_DoesNotTakeFailuresForCrashes(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retry.Deliveries = 100 })
		for range 10 {
			expectError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), func(*message.Message) ([]*message.Message, error) {
				return nil, errUndo
			}), errUndo)
		}
		for range 10 {
			ctx, cancel := context.WithCancel(t.Context())
			msg := message.NewMessageWithContext(inbox.ContextWithDelivery(ctx, delivery{redelivered: true, nacks: 1}), "a", nil)
			_ = deliverMessage(t, in, msg, func(*message.Message) ([]*message.Message, error) {
				cancel()
				return nil, ctx.Err()
			})
		}
		expectNoError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), effect))
		p.expect(t, 1, 1, 0)
		p.expectNotes(t, 0, 0)
		if len(dead.all()) != 0 {
			t.Errorf("letter %+v", dead.last())
		}
	})
}

// During an outage of something that handlers need nothing is attempted but a
// probe from time to time, and nothing counts.
func TestRetry_OutageOfADependencyPausesAndCostsNothing(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, nil)
		var back, paused atomic.Bool
		var runs, during atomic.Int32
		handler := func(msg *message.Message) ([]*message.Message, error) {
			if n := during.Add(1); n > 1 && paused.Load() && !back.Load() {
				t.Errorf("%d messages are handled at once in the outage", n)
			}
			defer during.Add(-1)
			runs.Add(1)
			if !back.Load() {
				return nil, inbox.Unavailable(errUndo)
			}
			return nil, addEffect(msg)
		}
		var all sync.WaitGroup
		for i := range 10 {
			all.Go(func() {
				for deliver(t, in, fmt.Sprint(i), handler) != nil && !t.Failed() { // as a subscriber that does not delay
					testserver.Pause(t.Context(), 10*time.Millisecond)
				}
			})
		}
		testserver.Pause(t.Context(), time.Second) // until they agree, and those that had been let through are out
		paused.Store(true)
		before := runs.Load()
		testserver.Pause(t.Context(), time.Second)
		if n := runs.Load() - before; n > 50 { // without a pause, each of ten would try a hundred times
			t.Errorf("%d runs in a second of the outage", n)
		}
		back.Store(true)
		all.Wait()
		p.expect(t, 10, 10, 0)
		p.expectNotes(t, 0, 0)
	})
}

func TestRetry_OutageOfTheDatabasePausesAndCostsNothing(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"postgresql", "postgresql_text_repeatable_read"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testDBs[name](t)
			in, _ := p.withDeadLetters(t, nil)
			for _, handle := range map[string]message.HandlerMiddleware{"alone": in.Middleware, "group": in.GroupMiddleware} {
				var begun atomic.Int32
				h := handle(func(msg *message.Message) ([]*message.Message, error) {
					if begun.Add(1) == 1 {
						p.tap.goAway(true)
					}
					return nil, addEffect(msg)
				})
				before := p.count(t, `select count(*) from effects`)
				var all sync.WaitGroup
				for i := range 10 {
					all.Go(func() {
						_, err := h(from(t, fmt.Sprint(before+i), delivery{redelivered: i%2 == 0}))
						expectNoError(t, err)
					})
				}
				eventually(t, "the outage begins", p.tap.isAway)
				testserver.Pause(t.Context(), 300*time.Millisecond) // the length of the outage
				runs := begun.Load()
				p.tap.goAway(false)
				all.Wait()
				if runs > 10 {
					t.Errorf("%d runs in the outage", runs)
				}
				p.expect(t, before+10, before+10, 0)
			}
			p.expectNotes(t, 0, 0)
		})
	}
}

func TestPurge_RemovesWhatIsOldButNotWhatIsDead(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retention = time.Second })
		other := p.inbox(t, func(cfg *inbox.Config) { cfg.Consumer = "mail"; cfg.Retention = time.Second })
		expectNoError(t, deliver(t, in, "dead", func(*message.Message) ([]*message.Message, error) { return nil, inbox.Permanent(errUndo) }))
		expectNoError(t, deliver(t, in, "old", effect))
		expectNoError(t, deliver(t, other, "theirs", effect))
		expectError(t, deliver(t, in, "failing", func(*message.Message) ([]*message.Message, error) { return nil, errUndo }), errUndo)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- in.Run(ctx) }()
		left := func() []string {
			var ids []string
			for _, id := range []string{"dead", "old", "theirs"} {
				if p.count(t, `select count(*) from {{inbox}} where message_id = '`+id+`'`) == 1 {
					ids = append(ids, id)
				}
			}
			return ids
		}
		if got := left(); !slices.Equal(got, []string{"dead", "old", "theirs"}) {
			t.Errorf("left at first: %v", got)
		}
		eventually(t, "what is old goes", func() bool {
			_, err := in.Purge(ctx)
			expectNoError(t, err)
			return len(left()) < 3
		})
		if got := left(); !slices.Equal(got, []string{"dead", "theirs"}) {
			t.Errorf("left: %v", got)
		}
		// The note is younger than the message that was removed first.
		eventually(t, "its notes go", func() bool {
			_, err := in.Purge(ctx)
			expectNoError(t, err)
			return p.count(t, `select count(*) from {{inbox_failures}}`) == 0
		})
		p.expectNotes(t, 0, 1)
		cancel()
		expectNoError(t, <-ended)
	})
}

func TestNew_RefusesRetriesThatCannotBe(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		_, err := inbox.New(p.db, inbox.Config{Consumer: "stock", Database: p.cfg, Retention: -1, Retry: inbox.Retry{
			Tries: -1, Backoff: -1, Deliveries: -1, Delay: time.Minute, DelayMax: time.Second, Crashes: 101,
		}})
		want := []string{
			"inbox.Config.Retention", "inbox.Config.Retry.Backoff", "inbox.Config.Retry.Crashes",
			"inbox.Config.Retry.DelayMax", "inbox.Config.Retry.Deliveries", "inbox.Config.Retry.Tries",
		}
		if got := configFields(err); !slices.Equal(got, want) {
			t.Errorf("bad fields: got %v, want %v", got, want)
		}
	})
}

// Whoever has forgotten to migrate is told at once, and not by a warning every ten
// seconds.
func TestRun_NeedsTheTables(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, func(cfg *inbox.Config) { cfg.Database.Prefix = "none_" })
		var schema *oncemill.SchemaError
		if err := in.Run(t.Context()); !errors.As(err, &schema) || schema.Set != "inbox" {
			t.Errorf("got %v", err)
		}
	})
}

// PostgreSQL refuses everything after a failed statement. A handler that ignores the error has
// failed, also at a redelivery, whose record is deleted before the commit.
func TestRetry_CountsAnIgnoredErrorAtARedelivery(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retry.Tries, cfg.Retry.Deliveries = 1, 2 })
	ignore := func(msg *message.Message) ([]*message.Message, error) {
		_ = handlerExec(msg, `select 1 / 0`)
		return nil, nil
	}
	if err := deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), ignore); err == nil {
		t.Error("the first delivery was acknowledged")
	}
	expectNoError(t, deliverMessage(t, in, from(t, "a", delivery{redelivered: true, nacks: 1}), ignore))
	if l := dead.last(); l.Reason != string(inbox.ReasonFailed) || l.Tries != 2 {
		t.Errorf("dead letter: %+v", l)
	}
	p.expectNotes(t, 0, 1)
}
