package inbox_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

var eve = dlq.Act{By: "eve", Reason: "wrong currency"}

// onlyLetter returns the dead letter of a message in a state.
func onlyLetter(t *testing.T, store *dlq.Store, id string, state dlq.State) *dlq.Letter {
	t.Helper()
	list, err := store.List(t.Context(), dlq.Filter{MessageID: id, States: []dlq.State{state}})
	expectNoError(t, err)
	if len(list) != 1 {
		t.Fatalf("%d letters of %s are %s", len(list), id, state)
	}
	l, err := store.Get(t.Context(), list[0].ID)
	expectNoError(t, err)
	return l
}

// An edited message reaches the handler once, under the id of the original. The original
// stays in its dead letter, and has no effect when it comes late.
func TestReplays_AnEditIsDeliveredOnceUnderTheSameID(t *testing.T) {
	for name, fingerprint := range map[string]func(*message.Message) []byte{
		"without fingerprints": nil,
		"with fingerprints":    func(m *message.Message) []byte { return m.Payload },
	} {
		t.Run(name, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				store, rec := p.letterStore(t), &recorder{}
				in := p.inbox(t, func(cfg *inbox.Config) {
					cfg.DeadLetters, cfg.Fingerprint = store, fingerprint
					cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
				})
				original := message.NewMessage("m", []byte("EUR"))
				original.Metadata = message.Metadata{"currency": "EUR", "trace": "1", "oncemill_key": "k"}
				expectNoError(t, deliverMessage(t, in, original.Copy(), bad))
				dead := onlyLetter(t, store, "m", dlq.StateDead)
				edit := dlq.Edit{Payload: []byte("USD"), Metadata: message.Metadata{"currency": "USD"}}
				expectNoError(t, store.ReplayEdited(t.Context(), dead.ID, edit, eve))
				if n, err := in.Replay(t.Context()); n != 1 || err != nil {
					t.Fatalf("replayed %d, %v", n, err)
				}
				sent := rec.msgs[0]
				if sent.UUID != "m" || string(sent.Payload) != "USD" || sent.Metadata["currency"] != "USD" || sent.Metadata["trace"] != "" || sent.Metadata["oncemill_key"] != "k" {
					t.Errorf("published %s %q %v", sent.UUID, sent.Payload, sent.Metadata)
				}
				// A mark on the original, or on something else, is no replay of the edit.
				forged := sent.Copy()
				forged.Payload = []byte("EUR")
				var handled []string
				handler := func(m *message.Message) ([]*message.Message, error) {
					handled = append(handled, m.UUID+" "+string(m.Payload))
					return effect(m)
				}
				for _, m := range []*message.Message{forged, sent.Copy(), sent.Copy(), original.Copy(), forged.Copy()} {
					m.SetContext(context.WithoutCancel(t.Context()))
					expectNoError(t, deliverMessage(t, in, m, handler))
				}
				if !slices.Equal(handled, []string{"m USD"}) {
					t.Errorf("handled %q", handled)
				}
				l, err := store.Get(t.Context(), dead.ID)
				expectNoError(t, err)
				if l.State != dlq.StateReplayed || string(l.Payload) != "EUR" || !maps.Equal(l.Metadata, dead.Metadata) || l.Edited == nil || !l.Edited.InUse || string(l.Edited.Payload) != "USD" || l.Edited.Act != eve || l.FailedAgain != 0 {
					t.Errorf("%+v, edit %+v", l, l.Edited)
				}
				conflicts, err := store.List(t.Context(), dlq.Filter{Reason: string(inbox.ReasonConflict)})
				expectNoError(t, err)
				if want := map[bool]int{false: 0, true: 1}[fingerprint != nil]; len(conflicts) != want {
					t.Errorf("%d conflicts, want %d", len(conflicts), want)
				}
			})
		})
	}
}

// An edit that fails is a new dead letter, which the old one names.
func TestReplays_AnEditThatFailsHasItsOwnLetter(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store, rec := p.letterStore(t), &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("m", []byte("one")), bad))
		first := onlyLetter(t, store, "m", dlq.StateDead)
		for round, content := range []string{"two", "three"} {
			dead := onlyLetter(t, store, "m", dlq.StateDead)
			expectNoError(t, store.ReplayEdited(t.Context(), dead.ID, dlq.Edit{Payload: []byte(content)}, eve))
			_, err := in.Replay(t.Context())
			expectNoError(t, err)
			m := rec.msgs[round]
			m.SetContext(context.WithoutCancel(t.Context()))
			expectNoError(t, deliverMessage(t, in, m, bad))
			next := onlyLetter(t, store, "m", dlq.StateDead)
			if string(next.Payload) != content {
				t.Errorf("the new letter holds %q, want %q", next.Payload, content)
			}
			old, err := store.Get(t.Context(), dead.ID)
			expectNoError(t, err)
			if old.State != dlq.StateReplayed || old.FailedAgain != next.ID {
				t.Errorf("letter %d is %s, failed again as %d, want %d", old.ID, old.State, old.FailedAgain, next.ID)
			}
		}
		if l, err := store.Get(t.Context(), first.ID); err != nil || string(l.Payload) != "one" {
			t.Errorf("%+v, %v", l, err)
		}
	})
}

// A discard while the edit is in the queue wins, and after its undo another replay counts.
func TestReplays_AnUndoneDiscardIsReplayedWithItsOwnToken(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store, rec := p.letterStore(t), &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Replays = &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		expectNoError(t, deliverMessage(t, in, message.NewMessage("m", []byte("one")), bad))
		id := onlyLetter(t, store, "m", dlq.StateDead).ID
		expectNoError(t, store.ReplayEdited(t.Context(), id, dlq.Edit{Payload: []byte("two")}, eve))
		_, err := in.Replay(t.Context())
		expectNoError(t, err)
		expectNoError(t, store.Discard(t.Context(), id, eve))
		expectNoError(t, store.Restore(t.Context(), id, eve))
		var state *dlq.StateError
		if err := store.Restore(t.Context(), id, eve); !errors.As(err, &state) || state.Action != "restored" {
			t.Errorf("a second undo: %v", err)
		}
		_, err = store.Replay(t.Context(), []int64{id}, eve)
		expectNoError(t, err)
		// It is published at once, although the message was a moment ago.
		if n, err := in.Replay(t.Context()); n != 1 || err != nil {
			t.Fatalf("replayed %d, %v", n, err)
		}
		var handled []string
		for _, m := range rec.msgs {
			m.SetContext(context.WithoutCancel(t.Context()))
			expectNoError(t, deliverMessage(t, in, m, func(m *message.Message) ([]*message.Message, error) {
				handled = append(handled, string(m.Payload))
				return effect(m)
			}))
		}
		if !slices.Equal(handled, []string{"one"}) {
			t.Errorf("handled %q", handled)
		}
	})
}
