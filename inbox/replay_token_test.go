package inbox_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// While a worker publishes a replay, an operator gives it up and edits the metadata. What the
// worker publishes then is the withdrawn message, not the edit.
func TestReplays_AWithdrawnMessageHasNoTokenOfItsEdit(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		var store *dlq.Store
		edited := false
		in, opened, rec := p.replaying(t, func(cfg *inbox.Config) {
			cfg.Replays.Topic = func(l *dlq.Letter) string {
				if !edited {
					edited = true
					expectNoError(t, store.Discard(t.Context(), l.ID, eve))
					expectNoError(t, store.Restore(t.Context(), l.ID, eve))
					expectNoError(t, store.ReplayEdited(t.Context(), l.ID, dlq.Edit{Metadata: message.Metadata{"currency": "USD"}}, eve))
				}
				return "queue"
			}
		})
		store = opened
		m := message.NewMessage("a", []byte("7"))
		m.Metadata.Set("currency", "EUR")
		expectNoError(t, deliverMessage(t, in, m, bad))
		publishReplays(t, in, store)
		_, err := in.Replay(t.Context())
		expectNoError(t, err)
		var effects []string
		for _, m := range rec.msgs {
			expectNoError(t, deliverMessage(t, in, redeliver(t, m, false), func(m *message.Message) ([]*message.Message, error) {
				effects = append(effects, m.Metadata.Get("currency"))
				return effect(m)
			}))
		}
		if len(rec.msgs) != 2 || len(effects) != 1 || effects[0] != "USD" {
			t.Errorf("effects %q of %d messages", effects, len(rec.msgs))
		}
	})
}
