package inbox_test

import (
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

func TestDeadLetters_KeepTheWholeMessageAndWhy(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store := p.letterStore(t)
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters = store
			cfg.Retry = inbox.Retry{Tries: 1, Deliveries: 2}
		})
		created := time.Now().Add(-time.Minute).Truncate(time.Second)
		failing := func(*message.Message) ([]*message.Message, error) { return nil, errUndo }
		var err error
		for range 2 {
			msg := from(t, "a", delivery{createdAt: created})
			msg.Metadata.Set("oncemill_key", "customer")
			err = deliverMessage(t, in, msg, failing)
		}
		expectNoError(t, err)
		panics := from(t, "b", delivery{})
		panics.Payload = nil
		expectNoError(t, deliverMessage(t, in, panics, func(*message.Message) ([]*message.Message, error) { panic(inbox.Permanent(errors.New("a\x00b"))) }))
		expectNoError(t, deliverMessage(t, in, from(t, "", delivery{}), failing))
		list, err := store.List(t.Context(), dlq.Filter{Consumer: "stock", Limit: 10})
		if err != nil || len(list) != 3 {
			t.Fatalf("%d letters, %v", len(list), err)
		}
		byID := map[string]*dlq.Letter{}
		for _, l := range list {
			if byID[l.MessageID], err = store.Get(t.Context(), l.ID); err != nil {
				t.Fatal(err)
			}
		}
		a, b := byID["a"], byID["b"]
		if a.State != dlq.StateDead || a.Source != dlq.FromConsumer || a.Reason != "failed" || a.Error != errUndo.Error() || a.Tries != 2 || len(a.Attempts) != 2 ||
			string(a.Payload) != "payload of a" || a.Metadata.Get("about") != "a" || a.Key != "customer" || !a.CreatedAt.Equal(created) || a.Attempts[0].At.IsZero() {
			t.Errorf("letter %+v", a)
		}
		if b.Stack == "" || len(b.Payload) != 0 || !b.CreatedAt.IsZero() || b.Reason != "permanent" || b.Fingerprint == "" || b.Fingerprint == a.Fingerprint {
			t.Errorf("letter %+v", b)
		}
	})
}
