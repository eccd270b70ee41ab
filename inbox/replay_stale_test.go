package inbox_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// imported adds the dead letter of a message that this inbox has never seen, so that nothing
// but its marks makes a copy a duplicate.
func imported(t *testing.T, store *dlq.Store, consumer string) (id int64) {
	t.Helper()
	importLetter(t, store, consumer, "m")
	return onlyLetter(t, store, "m", dlq.StateDead).ID
}

func importLetter(t *testing.T, store *dlq.Store, consumer, messageID string) {
	t.Helper()
	line, err := json.Marshal(dlq.Line{
		Version: 1, State: dlq.StateDead, Source: dlq.FromConsumer, Consumer: consumer, Topic: "orders", MessageID: messageID,
		Payload: []byte("original"), DiedAt: time.Now(), Reason: "failed",
	})
	expectNoError(t, err)
	done, err := store.Import(t.Context(), strings.NewReader(string(line)), eve)
	if err != nil || done.Added != 1 {
		t.Fatalf("%+v, %v", done, err)
	}
}

// A replay that somebody has discarded has no effect when its message arrives, whatever was
// done to the dead letter since. Neither this consumer nor another takes it for a message.
func TestReplays_ADiscardedReplayHasNoEffect(t *testing.T) {
	edit := func(content string) func(*testing.T, *dlq.Store, int64) {
		return func(t *testing.T, s *dlq.Store, id int64) {
			expectNoError(t, s.ReplayEdited(t.Context(), id, dlq.Edit{Payload: []byte(content)}, eve))
		}
	}
	plain := func(t *testing.T, s *dlq.Store, id int64) {
		_, err := s.Replay(t.Context(), []int64{id}, eve)
		expectNoError(t, err)
	}
	undo := func(t *testing.T, s *dlq.Store, id int64) { expectNoError(t, s.Restore(t.Context(), id, eve)) }
	type act = func(*testing.T, *dlq.Store, int64)
	for name, c := range map[string]struct {
		first act
		then  []act // after the discard
		want  []string
	}{
		"an edit":                   {edit("A"), nil, nil},
		"an edit, restored":         {edit("A"), []act{undo}, nil},
		"an edit, edited again":     {edit("A"), []act{undo, edit("B")}, []string{"B"}},
		"an edit, replayed":         {edit("A"), []act{undo, plain}, []string{"original"}},
		"a replay":                  {plain, nil, nil},
		"a replay, edited":          {plain, []act{undo, edit("B")}, []string{"B"}},
		"a replay, replayed":        {plain, []act{undo, plain}, []string{"original"}},
		"an edit, edited two times": {edit("A"), []act{undo, edit("B"), discardIt, undo, edit("C")}, []string{"C"}},
	} {
		t.Run(name, func(t *testing.T) {
			onEachDB(t, func(t *testing.T, p *testDB) {
				store, rec := p.letterStore(t), &recorder{}
				in := p.inbox(t, func(cfg *inbox.Config) {
					cfg.DeadLetters, cfg.Replays = store, &inbox.Replays{Publisher: rec, Topic: toQueue}
				})
				other := p.inbox(t, func(cfg *inbox.Config) { cfg.Consumer, cfg.DeadLetters = "other", store })
				id := imported(t, store, "stock")
				for i, act := range append([]act{c.first, discardIt}, c.then...) {
					act(t, store, id)
					if n, err := in.Replay(t.Context()); err != nil || i == 0 && n != 1 {
						t.Fatalf("replayed %d, %v", n, err)
					}
				}
				var handled []string
				handler := func(m *message.Message) ([]*message.Message, error) {
					handled = append(handled, string(m.Payload))
					return effect(m)
				}
				for _, to := range []*inbox.Inbox{other, in, in} {
					for _, m := range rec.msgs {
						m = m.Copy()
						m.SetContext(context.WithoutCancel(t.Context()))
						expectNoError(t, deliverMessage(t, to, m, handler))
					}
				}
				if !slices.Equal(handled, c.want) {
					t.Errorf("handled %q, want %q", handled, c.want)
				}
			})
		})
	}
}

func discardIt(t *testing.T, s *dlq.Store, id int64) {
	t.Helper()
	expectNoError(t, s.Discard(t.Context(), id, eve))
}
