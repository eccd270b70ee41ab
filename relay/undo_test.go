package relay_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/relay"
)

// fussy refuses some messages by their ids.
type fussy struct {
	mu     sync.Mutex
	refuse map[string]bool
	got    []string
}

func (f *fussy) Publish(_ string, msgs ...*message.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range msgs {
		if f.refuse[m.UUID] {
			return relay.Refused(errors.New("no"))
		}
		f.got = append(f.got, m.UUID)
	}
	return nil
}

func (f *fussy) Close() error { return nil }

func (f *fussy) delivered() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.got)
}

// A discard that is undone before the relay has done it leaves the message in its place,
// with its successors behind it. One that the relay has done cannot be undone.
func TestRelay_AnUndoneDiscardHoldsTheKeyAgain(t *testing.T) {
	oneDatabase(t, "SQLite", func(t *testing.T, p testDB) {
		box := p.box(t)
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		sink := &fussy{refuse: map[string]bool{"a/1": true, "b/1": true}}
		run := func() (stop func()) {
			worker, err := relay.New(box, relay.FromPublisher(sink), relay.Config{
				Logger: slog.New(slog.DiscardHandler), Retry: relay.Retry{MaxAttempts: 1, Exhausted: relay.ExhaustedHoldKey},
			})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- worker.Run(ctx) }()
			return func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
		}
		var held []*dlq.Letter
		stop := run()
		for _, key := range []string{"a", "b"} {
			first := message.NewMessage(key+"/1", nil)
			second := message.NewMessage(key+"/2", nil)
			first.Metadata.Set("oncemill_key", key)
			second.Metadata.Set("oncemill_key", key)
			commit(t, box, first, second)
		}
		testserver.Eventually(t, "both keys are held", func() bool {
			held, err = letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateHeld}, OldestFirst: true})
			return err == nil && len(held) == 2
		})
		stop()
		slices.SortFunc(held, func(a, b *dlq.Letter) int { return int(a.MessageID[0]) - int(b.MessageID[0]) })
		act := dlq.Act{By: "ada", Reason: "a test"}
		for _, l := range held {
			if err := letters.Discard(t.Context(), l.ID, act); err != nil {
				t.Fatal(err)
			}
		}
		if err := letters.Restore(t.Context(), held[0].ID, act); err != nil {
			t.Fatal(err)
		}
		defer run()()
		testserver.Eventually(t, "the other key goes on", func() bool { return slices.Equal(sink.delivered(), []string{"b/2"}) })
		var state *dlq.StateError
		testserver.Eventually(t, "the discard is done", func() bool {
			l, err := letters.Get(t.Context(), held[1].ID)
			return err == nil && l.State == dlq.StateDiscarded
		})
		if err := letters.Restore(t.Context(), held[1].ID, act); !errors.As(err, &state) || state.State != dlq.StateDiscarded || !strings.Contains(err.Error(), "its relay has removed the message") {
			t.Errorf("an undo after the message is gone: %v", err)
		}
		if l, err := letters.Get(t.Context(), held[0].ID); err != nil || l.State != dlq.StateHeld {
			t.Errorf("%+v, %v", l, err)
		}
		sink.mu.Lock()
		sink.refuse = nil
		sink.mu.Unlock()
		if _, err := letters.Replay(t.Context(), []int64{held[0].ID}, act); err != nil {
			t.Fatal(err)
		}
		testserver.Eventually(t, "the key goes on in its order", func() bool { return slices.Equal(sink.delivered(), []string{"b/2", "a/1", "a/2"}) })
	})
}

// A dead letter that was discarded at once is dead again, and its replay is delivered. One
// that fails again names its new dead letter.
func TestRelay_AnUndoneDiscardIsReplayed(t *testing.T) {
	oneDatabase(t, "PostgreSQL", func(t *testing.T, p testDB) {
		box := p.box(t)
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		sink := &fussy{refuse: map[string]bool{"m": true}}
		worker, err := relay.New(box, relay.FromPublisher(sink), relay.Config{Logger: slog.New(slog.DiscardHandler), Retry: relay.Retry{MaxAttempts: 1}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- worker.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}()
		commit(t, box, message.NewMessage("m", nil))
		dead := func() (l *dlq.Letter) {
			testserver.Eventually(t, "it is dead", func() bool {
				page, err := letters.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateDead}})
				if err == nil && len(page) == 1 {
					l = page[0]
				}
				return l != nil
			})
			return l
		}
		act := dlq.Act{By: "ada", Reason: "a test"}
		first := dead()
		if err := errors.Join(letters.Discard(t.Context(), first.ID, act), letters.Restore(t.Context(), first.ID, act)); err != nil {
			t.Fatal(err)
		}
		if _, err := letters.Replay(t.Context(), []int64{first.ID}, act); err != nil {
			t.Fatal(err)
		}
		second := dead()
		if l, err := letters.Get(t.Context(), first.ID); err != nil || l.State != dlq.StateReplayed || l.FailedAgain != second.ID {
			t.Errorf("%+v, %v", l, err)
		}
		sink.mu.Lock()
		sink.refuse = nil
		sink.mu.Unlock()
		if _, err := letters.Replay(t.Context(), []int64{second.ID}, act); err != nil {
			t.Fatal(err)
		}
		testserver.Eventually(t, "it is delivered", func() bool { return slices.Equal(sink.delivered(), []string{"m"}) })
	})
}
