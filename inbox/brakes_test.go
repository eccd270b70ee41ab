package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// A handler that uses up the time of its message, however little the inbox knows of that,
// has failed, and dies of it.
func TestBrakes_UsedUpTimeIsAFailure(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		for name, handle := range map[string]func(*inbox.Inbox) message.HandlerMiddleware{
			"alone": func(in *inbox.Inbox) message.HandlerMiddleware { return in.Middleware },
			"group": func(in *inbox.Inbox) message.HandlerMiddleware { return in.GroupMiddleware },
		} {
			in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
				cfg.Retry = inbox.Retry{Deliveries: 3, Delay: time.Millisecond}
				cfg.Logger = slog.New(slog.DiscardHandler)
			})
			runs := 0
			h := handle(in)(func(m *message.Message) ([]*message.Message, error) {
				if runs++; runs == 1 { // and keeps the transaction from its end
					return nil, keepRows(m, func() { <-m.Context().Done(); testserver.Pause(t.Context(), 1500*time.Millisecond) })
				}
				<-m.Context().Done()
				return nil, m.Context().Err()
			})
			deliveries := 0
			for err := errUndo; err != nil && deliveries < 20; deliveries++ {
				_, err = h(limited(t, name, 300*time.Millisecond))
			}
			if letter := dead.last(); deliveries > 6 || letter.MessageID != name || letter.Reason != string(inbox.ReasonFailed) || letter.Tries != 3 {
				t.Errorf("%s: %d runs in %d deliveries, letter %+v", name, runs, deliveries, letter)
			}
		}
	})
}

// A statement that is canceled by the end of a message's time is not an outage: nobody
// waits.
func TestBrakes_ATimeoutInAGroupClosesNoGate(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	var log lines
	in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
		cfg.Retry = inbox.Retry{Deliveries: 3, Delay: time.Millisecond}
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	h := in.GroupMiddleware(func(m *message.Message) ([]*message.Message, error) {
		if m.UUID == "slow" {
			return nil, handlerExec(m, `select pg_sleep(20)`)
		}
		return effect(m)
	})
	deliveries := 0
	for err := errUndo; err != nil && deliveries < 20; deliveries++ {
		_, err = h(limited(t, "slow", 300*time.Millisecond))
		_, other := h(from(t, fmt.Sprint("other ", deliveries), delivery{}))
		expectNoError(t, other)
	}
	if letter := dead.last(); letter.MessageID != "slow" || letter.Reason != string(inbox.ReasonFailed) || deliveries > 6 {
		t.Errorf("letter %+v after %d deliveries", letter, deliveries)
	}
	if log.count("consumption paused") > 0 {
		t.Error("consumption was paused")
	}
}

// lines keeps a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), what)
}

// One message that finds something unavailable delays itself alone, and dies in the end,
// if others are handled.
func TestBrakes_OneThatFindsNothingThereDies(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var log lines
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Retry = inbox.Retry{Delay: time.Second, Unavailable: 4}
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
		delayed := &atomic.Int64{}
		lacking := func(*message.Message) ([]*message.Message, error) { return nil, inbox.Unavailable(errUndo) }
		poison := func(n int) error {
			delayed.Store(0)
			return deliverMessage(t, in, from(t, "poison", delivery{delayed: delayed, nacks: n}), lacking)
		}
		expectError(t, poison(0), errUndo) // nothing was handled yet: it says nothing
		p.expectNotes(t, 0, 0)
		for n := 1; n <= 4; n++ {
			expectNoError(t, deliver(t, in, fmt.Sprint("m", n), effect))
			err := poison(n)
			if n == 4 {
				expectNoError(t, err)
				break
			}
			expectError(t, err, errUndo)
			if d, least := time.Duration(delayed.Load()), time.Second<<(n-1)/2; d < least || d > 3*least {
				t.Errorf("delivery %d comes again after %v", n, d)
			}
			expectError(t, poison(n), errUndo) // without a success between it is not charged
		}
		if letter := dead.last(); letter.Reason != string(inbox.ReasonUnavailable) || letter.Tries != 4 {
			t.Errorf("letter %+v", letter)
		}
		if log.count("consumption paused") > 0 {
			t.Error("consumption was paused")
		}
		p.expect(t, 4, 5, 0)
	})
}

// One unavailable tenant, one poison message and one hanging handler leave the others
// their rate: that of an inbox without trouble in the same seconds, on the same machine.
func TestBrakes_TroubleOfOneLeavesTheOthersTheirRate(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	dead := p.letterStore(t)
	rounds := 0
	begin := func(p *testDB, trouble string) message.HandlerFunc {
		rounds++
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Consumer, cfg.DeadLetters, cfg.Logger = fmt.Sprint("stock ", rounds), dead, slog.New(slog.DiscardHandler)
			cfg.Retry = inbox.Retry{}
			cfg.Timeout = 10 * time.Second
		})
		return in.Middleware(func(m *message.Message) ([]*message.Message, error) {
			if strings.HasPrefix(m.UUID, "trouble") {
				switch trouble {
				case "unavailable":
					return nil, inbox.Unavailable(errors.New("tenant 7 is away"))
				case "poison":
					return nil, errUndo
				case "hanging":
					<-m.Context().Done()
					return nil, m.Context().Err()
				}
			}
			testserver.Pause(m.Context(), testserver.Rounds(40*time.Millisecond, 10*time.Millisecond)) // so that the rate is the handlers', not the machine's
			return nil, addEffect(m)
		})
	}
	measure := func(trouble string) (with, without int64) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		apart := *p // with connections of its own, so that what uses them up is seen
		apart.db = openTap(t, p.tap)
		troubled, untroubled := begin(p, trouble), begin(&apart, "")
		began := time.Now()
		var all sync.WaitGroup
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				msg := message.NewMessageWithContext(inbox.ContextWithDelivery(ctx, delivery{nacks: i}), "trouble", nil)
				msg.Metadata.Set(outbox.KeyMetadata, "tenant 7")
				_, _ = troubled(msg)
				testserver.Pause(ctx, 50*time.Millisecond)
			}
		})
		var handled [2]atomic.Int64
		for side, h := range []message.HandlerFunc{troubled, untroubled} {
			for w := range 8 {
				all.Go(func() {
					for i := 0; ctx.Err() == nil; i++ {
						if _, err := h(from(t, fmt.Sprint(trouble, side, w, " ", i), delivery{})); err == nil {
							handled[side].Add(1)
						}
					}
				})
			}
		}
		eventually(t, "400 are handled without trouble, and it took four seconds", func() bool {
			return handled[1].Load() >= 400 && time.Since(began) > 4*time.Second
		})
		with, without = handled[0].Load(), handled[1].Load()
		cancel()
		all.Wait()
		return with, without
	}
	for _, trouble := range []string{"unavailable", "poison", "hanging"} {
		with, without := measure(trouble)
		for try := 0; with < without*9/10 && try < 3; try++ { // the machine is others' too
			with, without = measure(trouble)
		}
		t.Logf("%s: %d messages of others, %d without", trouble, with, without)
		if with < without*9/10 {
			t.Errorf("%s: %d messages of others, %d without", trouble, with, without)
		}
	}
}

// crash delivers a message whose handler ends its goroutine: its start is recorded, its end is not.
func crash(t *testing.T, in *inbox.Inbox, msg *message.Message) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = deliverMessage(t, in, msg, func(*message.Message) ([]*message.Message, error) {
			runtime.Goexit()
			return nil, nil
		})
	}()
	<-ended
}

// An isolated message waits for others, and they for it, for a short time only: also if one of them
// does not end, and if it does not end itself.
func TestBrakes_AnIsolatedMessageIsAloneForAShortTime(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	in, dead := p.withDeadLetters(t, nil)
	isolated := func() *message.Message { return from(t, "isolated", delivery{redelivered: true}) }
	for range 2 {
		crash(t, in, isolated())
	}
	var all sync.WaitGroup
	hold := func(msg *message.Message) (begun, end chan struct{}) {
		running, release := make(chan struct{}), make(chan struct{})
		all.Go(func() {
			expectNoError(t, deliverMessage(t, in, msg, func(m *message.Message) ([]*message.Message, error) {
				close(running)
				<-release
				return effect(m)
			}))
		})
		return running, release
	}
	running, release := hold(from(t, "long", delivery{}))
	<-running
	crowded := deliverMessage(t, in, isolated(), effect)
	if crowded == nil || p.count(t, `select count(*) from effects`) != 0 {
		t.Errorf("the isolated message was not alone: %v", crowded)
	}
	expectNoError(t, deliver(t, in, "innocent 1", effect)) // beside the long one
	close(release)
	all.Wait()
	running, release = hold(isolated())
	<-running
	if n := p.count(t, `select alone from {{inbox_failures}}`); n != 2 { // the second crash was one
		t.Errorf("the isolated message is charged with %d", n)
	}
	expectNoError(t, deliver(t, in, "innocent 2", effect)) // beside the isolated one
	if n := p.count(t, `select alone from {{inbox_failures}}`); n != 1 {
		t.Errorf("the isolated message is charged with %d though it is not alone", n)
	}
	close(release)
	all.Wait()
	p.expect(t, 4, 4, 0)
	p.expectNotes(t, 0, 0)
	if len(dead.all()) > 0 {
		t.Errorf("letter %+v", dead.last())
	}
}

// A handler that does not return though its time is up keeps no isolated message out, which is not
// charged beside it.
func TestBrakes_AHangingHandlerKeepsNoIsolatedMessageOut(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Timeout = time.Second })
		isolated := func() *message.Message { return from(t, "isolated", delivery{redelivered: true}) }
		crash(t, in, isolated())
		hanging, release := make(chan struct{}), make(chan struct{})
		var all sync.WaitGroup
		all.Go(func() {
			_ = deliver(t, in, "hanging", func(*message.Message) ([]*message.Message, error) {
				close(hanging)
				<-release
				return nil, errUndo
			})
		})
		defer all.Wait()
		defer close(release)
		<-hanging
		for range 5 { // more than Retry.Crashes
			alone := `select coalesce(max(alone), 0) from {{inbox_failures}}`
			for begin := time.Now(); ; testserver.Pause(t.Context(), 50*time.Millisecond) {
				runs := 0
				err := deliverMessage(t, in, isolated(), func(*message.Message) ([]*message.Message, error) {
					runs++
					if n := p.count(t, alone); n != 0 {
						t.Errorf("the isolated message is charged with %d", n)
					}
					return nil, inbox.Unavailable(errUndo)
				})
				if runs > 0 {
					expectError(t, err, errUndo)
					break
				}
				if time.Since(begin) > testserver.MaxWait {
					t.Fatalf("the isolated message is kept out: %v", err)
				}
			}
			crash(t, in, isolated())
		}
		if len(dead.all()) > 0 {
			t.Errorf("letter %+v", dead.last())
		}
	})
}

// A message that has failed comes again alone: no group has it twice.
func TestBrakes_WhatWasNackedJoinsNoGroup(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
		cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 5, Delay: time.Millisecond}
		cfg.Group.Wait = 200 * time.Millisecond
	})
	var mu sync.Mutex
	runs := map[string]int{}
	h := in.GroupMiddleware(func(m *message.Message) ([]*message.Message, error) {
		mu.Lock()
		runs[m.UUID]++
		mu.Unlock()
		if m.UUID == "poison" {
			return nil, errUndo
		}
		return effect(m)
	})
	for round := range 5 {
		var all sync.WaitGroup
		for i := range 9 {
			all.Go(func() { _, _ = h(from(t, fmt.Sprint(round, " ", i), delivery{})) })
		}
		all.Go(func() { _, _ = h(from(t, "poison", delivery{nacks: round})) })
		all.Wait()
	}
	vain := -runs["poison"]
	for _, n := range runs {
		vain += n
	}
	if vain -= 45; vain > 9 || len(dead.all()) != 1 {
		t.Errorf("%d runs of 45 innocents in vain, %d letters", vain, len(dead.all()))
	}
	p.expect(t, 45, 46, 0)
}

// A setting that a handler makes reaches no other message of its group.
func TestBrakes_SettingsAreRefusedInGroups(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	in := p.inbox(t, func(cfg *inbox.Config) { cfg.Group.Wait = 200 * time.Millisecond })
	var mu sync.Mutex
	seen := map[string]int{}
	var refused atomic.Int32
	h := in.GroupMiddleware(func(m *message.Message) ([]*message.Message, error) {
		tx, err := handlerTx(m.Context())
		if err != nil {
			return nil, err
		}
		if m.UUID < "5" {
			texts := []string{"set local app.tenant = 'a'", "SELECT set_config('app.tenant', 'a', true)", "/* */ reset app.tenant; set local app.tenant to 'a'", "select 1; set local app.tenant = 'a'", "set local app.tenant = 'a'"}
			if _, err := tx.ExecContext(m.Context(), texts[m.UUID[0]-'0']); err != nil {
				if !errors.Is(err, inbox.ErrShared) {
					t.Error(err)
				}
				refused.Add(1)
				return nil, err
			}
		}
		var tenant string
		if err := tx.QueryRowContext(m.Context(), `select coalesce(current_setting('app.tenant', true), '')`).Scan(&tenant); err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		seen[m.UUID+tenant]++
		return effect(m)
	})
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			_, err := h(from(t, fmt.Sprint(i), delivery{}))
			expectNoError(t, err)
		})
	}
	all.Wait()
	if refused.Load() == 0 {
		t.Error("there was no group: the test shows nothing")
	}
	for i := range 10 {
		tenant := ""
		if i < 5 {
			tenant = "a"
		}
		if seen[fmt.Sprint(i)+tenant] == 0 {
			t.Errorf("message %d did not run as %q: %v", i, tenant, seen)
		}
	}
	p.expect(t, 10, 10, 0)
}

// A message that was to come later is not handled before, whoever delivers it.
func TestBrakes_RetryAfterIsKept(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _ := p.withDeadLetters(t, nil)
		delayed := &atomic.Int64{}
		runs := 0
		later := func(*message.Message) ([]*message.Message, error) {
			runs++
			return nil, inbox.RetryAfter(errUndo, time.Hour)
		}
		expectError(t, deliverMessage(t, in, from(t, "a", delivery{delayed: delayed}), later), errUndo)
		for range 3 {
			delayed.Store(0)
			if err := deliverMessage(t, in, from(t, "a", delivery{redelivered: true, delayed: delayed}), later); err == nil {
				t.Error("acknowledged")
			}
			if d := time.Duration(delayed.Load()); d < 59*time.Minute || d > time.Hour {
				t.Errorf("comes again after %v", d)
			}
		}
		if runs != 1 {
			t.Errorf("%d runs within the hour", runs)
		}
		p.expectNotes(t, 1, 0)
	})
}

// What the database quotes of a payload gets into no letter, note, log or returned error.
func TestBrakes_ValuesStayOutOfTexts(t *testing.T) {
	t.Parallel()
	p := postgres(t)
	var log lines
	in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
		cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 2, Delay: time.Millisecond}
		cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	for range 2 {
		err := deliverMessage(t, in, from(t, "a", delivery{}), func(m *message.Message) ([]*message.Message, error) {
			return nil, fmt.Errorf("reserve: %w", handlerExec(m, `select $1::text::integer`, "canary"))
		})
		if err != nil && (strings.Contains(err.Error(), "canary") || !strings.Contains(err.Error(), "22P02") || sqlerr.State(err) != "22P02") {
			t.Errorf("returned %v", err)
		}
	}
	letter := dead.last()
	if text := fmt.Sprintf("%+v", *letter); strings.Contains(text, "canary") || !strings.Contains(letter.Error, "reserve: database error, SQLSTATE 22P02") {
		t.Errorf("letter %s", text)
	}
	if log.count("message failed") != 1 || log.count("failed_deliveries=1 dead_letter_after=2 next_in=") != 1 {
		t.Errorf("no word of the next delivery: %s", log.text.String())
	}
	if log.count("canary") > 0 || log.count("22P02") == 0 {
		t.Errorf("logged: %s", log.text.String())
	}
}
