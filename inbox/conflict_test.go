package inbox_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
)

// Messages of one id and payload may still be different ones: the fingerprint says so. Each
// has a letter, and copies of it have none.
func TestConflict_EachMessageHasALetter(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) {
			cfg.Fingerprint = func(m *message.Message) []byte { return []byte(m.Metadata.Get("tenant") + string(m.Payload)) }
		})
		for _, tenant := range []string{"a", "b", "c", "c", "d"} {
			m := from(t, "1", delivery{})
			m.Metadata.Set("tenant", tenant)
			expectNoError(t, deliverMessage(t, in, m, effect))
		}
		if n := len(dead.all()); n != 3 {
			t.Errorf("%d letters, want those of b, c and d", n)
		}
	})
}
