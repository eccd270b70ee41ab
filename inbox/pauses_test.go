package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/steer"
)

var (
	stock   = steer.Target{Kind: steer.Consumer, Name: "stock"}
	byGrace = steer.Act{By: "grace", Reason: "a test"}
	longer  = 2500 * time.Millisecond // than a read of the pauses applies
	shortly = 300 * time.Millisecond
)

func (p *testDB) control(t *testing.T) *steer.Control {
	t.Helper()
	expectNoError(t, oncemill.Migrate(t.Context(), p.db, p.cfg, audit.Migrations, steer.Migrations))
	c, err := steer.New(p.db, steer.Config{Database: p.cfg})
	expectNoError(t, err)
	return c
}

// A process that starts while its consumer is paused handles nothing either.
func TestInbox_APausedConsumerHandlesNothingAndLosesNothing(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		control := p.control(t)
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		in := p.inbox(t, nil)
		mail := p.inbox(t, func(cfg *inbox.Config) { cfg.Consumer = "mail" })
		ended := make(chan error, 3)
		for i := range 3 {
			go func() { ended <- deliver(t, in, fmt.Sprint("m", i), effect) }()
		}
		expectNoError(t, deliver(t, mail, "m0", effect))
		time.Sleep(longer)
		if n := p.count(t, `select count(*) from effects`); n != 1 {
			t.Errorf("%d effects while paused", n)
		}
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		for range 3 {
			expectNoError(t, <-ended)
		}
		if n := p.count(t, `select count(*) from effects`); n != 4 {
			t.Errorf("%d effects", n)
		}
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		time.Sleep(longer)
		ctx, cancel := context.WithTimeout(t.Context(), shortly)
		defer cancel()
		msg := message.NewMessage("m9", nil)
		msg.SetContext(ctx)
		if err := deliverMessage(t, in, msg, effect); !errors.Is(err, inbox.ErrPaused) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("its context has ended: %v", err)
		}
		if n := p.count(t, `select count(*) from effects`); n != 4 {
			t.Errorf("%d effects after it was paused again", n)
		}
	})
}

// The failures of a message before the pause count; its deliveries while paused do not.
func TestInbox_APauseIsNoFailure(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		control := p.control(t)
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = p.letterStore(t)
			cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 2}
		})
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), shortly)
			msg := message.NewMessage("m", nil)
			msg.SetContext(ctx)
			if err := deliverMessage(t, in, msg, effect); !errors.Is(err, inbox.ErrPaused) {
				t.Errorf("paused: %v", err)
			}
			cancel()
		}
		if n := p.count(t, `select count(*) from {{inbox}}`) + p.count(t, `select count(*) from {{dead_letters}}`); n != 0 {
			t.Errorf("%d rows were written", n)
		}
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		expectNoError(t, deliver(t, in, "m", effect))
	})
}

func TestInbox_ThePauseOfAnInboxPausesItsHandlersAndOneHandlerAlone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		control, in := p.control(t), p.inbox(t, nil)
		pubsub := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		router := message.NewDefaultRouter(watermill.NopLogger{})
		router.AddMiddleware(in.PerHandler)
		handled := map[string]*atomic.Int32{"one": {}, "two": {}}
		for name, n := range handled {
			router.AddConsumerHandler(name, "orders", pubsub, func(*message.Message) error { n.Add(1); return nil })
		}
		ended := make(chan error)
		go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
		<-router.Running()
		expectCounts := func(one, two int32) {
			t.Helper()
			eventually(t, "what is not paused goes on", func() bool { return handled["one"].Load() >= one && handled["two"].Load() >= two })
			time.Sleep(shortly)
			if handled["one"].Load() != one || handled["two"].Load() != two {
				t.Errorf("%d and %d handled, want %d and %d", handled["one"].Load(), handled["two"].Load(), one, two)
			}
		}
		one := steer.Target{Kind: steer.Consumer, Name: "stock/one"}
		expectNoError(t, control.Pause(t.Context(), one, byGrace))
		expectNoError(t, pubsub.Publish("orders", message.NewMessage("a", nil)))
		expectCounts(0, 1)
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		time.Sleep(longer)
		expectNoError(t, pubsub.Publish("orders", message.NewMessage("b", nil)))
		expectCounts(0, 1)
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		expectCounts(0, 2)
		expectNoError(t, control.Resume(t.Context(), one, byGrace))
		expectCounts(2, 2)
		if err := errors.Join(router.Close(), <-ended, pubsub.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Where the tables do not exist nothing is paused, and they are found once they do.
func TestInbox_WithoutTheTablesOfPausesNothingIsPaused(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		expectNoError(t, deliver(t, in, "a", effect))
		expectNoError(t, p.control(t).Pause(t.Context(), stock, byGrace))
		time.Sleep(longer)
		ctx, cancel := context.WithTimeout(t.Context(), shortly)
		defer cancel()
		msg := message.NewMessage("b", nil)
		msg.SetContext(ctx)
		expectError(t, deliverMessage(t, in, msg, effect), inbox.ErrPaused)
	})
}

func TestInbox_ReplaysOfAPausedConsumerWait(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		control, letters := p.control(t), p.letterStore(t)
		published := &publishedTopics{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = letters
			cfg.Replays = &inbox.Replays{Publisher: published, Topic: func(*dlq.Letter) string { return "again" }}
		})
		err := deliver(t, in, "m", func(*message.Message) ([]*message.Message, error) {
			return nil, inbox.Permanent(errors.New("no"))
		})
		expectNoError(t, err)
		list, err := letters.List(t.Context(), dlq.Filter{})
		if err != nil || len(list) != 1 {
			t.Fatal(list, err)
		}
		if _, err := letters.Replay(t.Context(), []int64{list[0].ID}, dlq.Act{By: "ada"}); err != nil {
			t.Fatal(err)
		}
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		time.Sleep(longer)
		if n, err := in.Replay(t.Context()); n != 0 || err != nil {
			t.Errorf("%d replayed while paused, %v", n, err)
		}
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		time.Sleep(longer)
		if n, err := in.Replay(t.Context()); n != 1 || err != nil || !slices.Equal(published.topics, []string{"again"}) {
			t.Errorf("%d replayed to %s, %v", n, strings.Join(published.topics, " "), err)
		}
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		time.Sleep(longer)
		_, err = in.Replay(t.Context())
		expectNoError(t, err)
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		time.Sleep(longer)
		if n, err := in.Replay(t.Context()); n != 0 || err != nil {
			t.Errorf("%d published again after a pause, %v", n, err)
		}
	})
}

type publishedTopics struct{ topics []string }

func (p *publishedTopics) Publish(topic string, _ ...*message.Message) error {
	p.topics = append(p.topics, topic)
	return nil
}

func (p *publishedTopics) Close() error { return nil }

// A process starts while the pauses cannot be read. Its deliveries do not each ask for them.
func TestInbox_HandlesNothingBeforeItKnowsThePauses(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		control := p.control(t)
		expectNoError(t, control.Pause(t.Context(), stock, byGrace))
		p.exec(t, `alter table {{pauses}} rename column kind to no_kind`)
		var log lines
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		})
		ended := make(chan error, 40)
		began := time.Now()
		for i := range cap(ended) {
			go func() { ended <- deliver(t, in, fmt.Sprint("m", i), effect) }()
		}
		time.Sleep(longer)
		if n, most := log.count("pauses could not be read"), 1+int(time.Since(began)/time.Second); n == 0 || n > most {
			t.Errorf("the pauses were read %d times, want at most one a second: %d", n, most)
		}
		p.exec(t, `alter table {{pauses}} rename column no_kind to kind`)
		time.Sleep(longer)
		if n := p.count(t, `select count(*) from effects`); n != 0 {
			t.Errorf("%d effects while paused", n)
		}
		expectNoError(t, control.Resume(t.Context(), stock, byGrace))
		for range cap(ended) {
			expectNoError(t, <-ended)
		}
	})
}
