package inbox_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// replaying returns an inbox that gives up soon, its letters, and what it publishes of them.
func (p *testDB) replaying(t *testing.T, change func(*inbox.Config)) (*inbox.Inbox, *dlq.Store, *recorder) {
	store := p.letterStore(t)
	rec := &recorder{}
	return p.inbox(t, func(cfg *inbox.Config) {
		cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 3, Delay: time.Millisecond, Crashes: 2}
		cfg.DeadLetters = store
		cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		if change != nil {
			change(cfg)
		}
	}), store, rec
}

// publishReplays lets in publish the messages of all that died, and returns their
// letters.
func publishReplays(t *testing.T, in *inbox.Inbox, store *dlq.Store) (ids []int64) {
	t.Helper()
	ids = replayAll(t, store, "stock")
	_, err := in.Replay(t.Context())
	expectNoError(t, err)
	return ids
}

func statesOf(t *testing.T, store *dlq.Store) map[string]int {
	t.Helper()
	got := map[string]int{}
	list, err := store.List(t.Context(), dlq.Filter{})
	expectNoError(t, err)
	for _, l := range list {
		got[string(l.State)+" "+l.Reason]++
	}
	return got
}

func redeliver(t *testing.T, m *message.Message, again bool) *message.Message {
	c := m.Copy()
	c.SetContext(inbox.ContextWithDelivery(context.WithoutCancel(t.Context()), delivery{redelivered: again}))
	return c
}

// A replay that keeps failing in the ordinary way, with Run's purges between deliveries.
func TestReplays_OneThatFailsDies(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		publishReplays(t, in, store)
		for i := range 12 {
			err := deliverMessage(t, in, redeliver(t, rec.msgs[0], i > 0), func(*message.Message) ([]*message.Message, error) { return nil, errors.New("still broken") })
			if err == nil {
				break // settled
			}
			_, err = in.Purge(t.Context()) // every 10 s
			expectNoError(t, err)
		}
		if got := statesOf(t, store); got["replayed permanent"] != 1 || got["dead failed"] != 1 {
			t.Errorf("after 12 failed deliveries of Deliveries: 3: %v", got)
		}
	})
}

// A replay that ends the process, time and again.
func TestReplays_OneThatCrashesDies(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		publishReplays(t, in, store)
		crashes := 0
		for i := range 12 {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = deliverMessage(t, in, redeliver(t, rec.msgs[0], i > 0), func(*message.Message) ([]*message.Message, error) {
					crashes++
					runtime.Goexit()
					return nil, nil
				})
			}()
			<-ended
		}
		if got := statesOf(t, store); crashes > 4 || got["dead crashed"] != 1 {
			t.Errorf("%d crashes with Crashes: 2; letters %v", crashes, got)
		}
	})
}

// A replay that the subscriber cannot read goes on: who made the message is not known.
func TestReplays_OneThatCannotBeReadGoesOn(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, in.Refuse(t.Context(), message.NewMessage("a", []byte("x")), errors.New("no such encoding")))
		publishReplays(t, in, store)
		expectNoError(t, in.Refuse(t.Context(), rec.msgs[0], errors.New("no such encoding")))
		if got := statesOf(t, store); got["replaying malformed"] != 1 || got["dead malformed"] != 1 {
			t.Errorf("letters %v, want one replaying and one dead", got)
		}
		for range 2 {
			expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), effect))
		}
		if got := statesOf(t, store); got["replayed malformed"] != 1 {
			t.Errorf("letters %v, want one replayed", got)
		}
		p.expect(t, 1, 1, 0)
	})
}

// Other consumers of a replay's topic acknowledge it unseen if they can check it. It may
// be older than ids are kept, and it has one effect however often it comes.
func TestReplays_AreForOneConsumer(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) { cfg.Retention = time.Hour })
		mail, _, _ := p.replaying(t, func(cfg *inbox.Config) { cfg.Consumer, cfg.Retention = "mail", time.Hour })
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", []byte("x")), bad))
		publishReplays(t, in, store)
		old := func() *message.Message {
			m := rec.msgs[0].Copy()
			m.SetContext(inbox.ContextWithDelivery(context.WithoutCancel(t.Context()), delivery{createdAt: time.Now().Add(-240 * time.Hour)}))
			return m
		}
		expectNoError(t, deliverMessage(t, mail, old(), effect))
		p.expect(t, 0, 1, 0)
		for range 3 {
			_, err := in.GroupMiddleware(effect)(old())
			expectNoError(t, err)
			expectNoError(t, deliverMessage(t, mail, old(), effect))
		}
		p.expect(t, 1, 1, 0)
	})
}

// The consumers of another process than the one that publishes have no Replays.
func TestReplays_EndWhereMessagesAreHandled(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		plain, _, _ := p.replaying(t, func(cfg *inbox.Config) { cfg.Replays = nil })
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		expectNoError(t, deliverMessage(t, in, message.NewMessage("", nil), effect))
		publishReplays(t, in, store)
		for range 2 {
			for _, m := range rec.msgs {
				expectNoError(t, deliverMessage(t, plain, redeliver(t, m, false), effect))
			}
		}
		if got := statesOf(t, store); got["replayed permanent"] != 1 || got["replayed no-message-id"] != 1 || len(got) != 2 {
			t.Errorf("letters %v, want two replayed", got)
		}
	})
}

// A message with marks that no inbox has made.
func TestReplays_MarksOfNoLetterAreNone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, _, _ := p.replaying(t, nil)
		ran := 0
		h := func(*message.Message) ([]*message.Message, error) { ran++; return nil, nil }
		m := message.NewMessage("a", []byte("signed"))
		expectNoError(t, deliverMessage(t, in, redeliver(t, m, false), h))
		forged := redeliver(t, m, false)
		forged.Metadata.Set("oncemill_replay", "0")
		forged.Metadata.Set("oncemill_replay_id", "letter-0")
		expectNoError(t, deliverMessage(t, in, forged, h))
		if ran != 1 {
			t.Errorf("handled %d times", ran)
		}
	})
}

// An unverified message with the number of a letter that is being replayed.
func TestReplays_ForgedMarksEndNone(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Verify = func(m *message.Message) error {
				if m.Metadata.Get("sig") != "ok" {
					return errors.New("no signature")
				}
				return nil
			}
		})
		m := message.NewMessage("a", []byte("genuine"))
		m.Metadata.Set("sig", "ok")
		expectNoError(t, deliverMessage(t, in, m, bad))
		publishReplays(t, in, store)
		forged := message.NewMessage("evil", []byte("forged"))
		forged.Metadata.Set("oncemill_replay", "1")
		forged.Metadata.Set("oncemill_replay_id", "letter-1")
		forged.SetContext(context.WithoutCancel(t.Context()))
		expectNoError(t, deliverMessage(t, in, forged, effect))
		ran := false
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), func(*message.Message) ([]*message.Message, error) { ran = true; return nil, nil }))
		if !ran {
			t.Errorf("the genuine replay was acknowledged without effect; letters %v", statesOf(t, store))
		}
	})
}

// An operator gives a replay up that comes to nobody.
func TestReplays_CanBeGivenUp(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, _ := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		ids := replayAll(t, store, "stock")
		if err := store.Discard(t.Context(), ids[0], dlq.Act{By: "ada", Reason: "its queue is gone"}); err != nil {
			t.Error(err)
		}
	})
}

// A redelivered copy of a replay that has ended: must not wait for its own transaction.
func TestReplays_ALateCopyWaitsForNobody(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, store, rec := p.replaying(t, nil)
		expectNoError(t, deliverMessage(t, in, message.NewMessage("a", nil), bad))
		publishReplays(t, in, store)
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], false), bad)) // dead again
		begin := time.Now()
		expectNoError(t, deliverMessage(t, in, redeliver(t, rec.msgs[0], true), bad))
		if took := time.Since(begin); took > 8*time.Second { // SQLite's busy timeout is 10 s
			t.Errorf("took %v", took)
		}
	})
}
