package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
)

// Operators replay, edit, discard and restore the same dead letters while their messages
// arrive, again and again and late. Each message has the content of the replay that ended its
// dead letter, once, or no effect if it is discarded. Each act is in the audit.
func TestReplays_ActsAtOnceHaveOneEffect(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		store, rec := p.letterStore(t), &recorder{}
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Replays = store, &inbox.Replays{Publisher: rec, Topic: toQueue}
		})
		ids := []int64{imported(t, store, "stock")}
		for i := range 3 {
			name := fmt.Sprint("own", i)
			expectNoError(t, deliverMessage(t, in, message.NewMessage(name, []byte("original")), bad))
			ids = append(ids, onlyLetter(t, store, name, dlq.StateDead).ID)
		}
		handler := func(m *message.Message) ([]*message.Message, error) {
			return nil, handlerExec(m, `insert into effects (message_id) values ($1)`, m.UUID+" "+string(m.Payload))
		}
		sent := func() []*message.Message {
			rec.mu.Lock()
			defer rec.mu.Unlock()
			return append([]*message.Message(nil), rec.msgs...)
		}
		deliver := func(m *message.Message) error {
			m = m.Copy()
			m.SetContext(context.WithoutCancel(t.Context()))
			return deliverMessage(t, in, m, handler)
		}
		refused := func(err error) {
			var state *dlq.StateError
			if err != nil && !errors.As(err, &state) {
				t.Error(err)
			}
		}
		var operators, workers sync.WaitGroup
		stop := make(chan struct{})
		for range 2 {
			workers.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if _, err := in.Replay(t.Context()); err != nil {
						t.Error(err)
					}
					if all := sent(); len(all) > 0 {
						if err := deliver(all[rand.IntN(len(all))]); err != nil && !errors.Is(err, inbox.ErrBeingHandled) {
							t.Error(err)
						}
					}
				}
			})
		}
		for operator := range 3 {
			operators.Go(func() {
				for n := range 25 {
					id := ids[rand.IntN(len(ids))]
					switch rand.IntN(6) {
					case 0:
						_, err := store.Replay(t.Context(), []int64{id}, eve)
						refused(err)
					case 1:
						refused(store.ReplayEdited(t.Context(), id, dlq.Edit{Payload: fmt.Appendf(nil, "edit %d of %d", n, operator)}, eve))
					case 2, 3:
						refused(store.Discard(t.Context(), id, eve))
					default:
						refused(store.Restore(t.Context(), id, eve))
					}
				}
			})
		}
		operators.Wait()
		close(stop)
		workers.Wait()
		for _, id := range ids { // what is open is replayed
			_, err := store.Replay(t.Context(), []int64{id}, eve)
			refused(err)
		}
		log, err := audit.New(p.db, audit.Config{Database: p.cfg})
		expectNoError(t, err)
		for begin := time.Now(); ; {
			_, err := in.Replay(t.Context())
			expectNoError(t, err)
			for _, m := range sent() {
				if err := deliver(m); err != nil && !errors.Is(err, inbox.ErrBeingHandled) {
					t.Error(err)
				}
			}
			open, err := store.List(t.Context(), dlq.Filter{States: []dlq.State{dlq.StateReplaying}})
			expectNoError(t, err)
			if len(open) == 0 {
				break
			}
			if time.Since(begin) > time.Minute {
				t.Fatalf("%d replays do not end", len(open))
			}
		}
		for _, id := range ids {
			l, err := store.Get(t.Context(), id)
			expectNoError(t, err)
			payload, want, ends := string(l.Payload), 1, 1
			if l.Edited != nil && l.Edited.InUse {
				payload = string(l.Edited.Payload)
			}
			if l.State == dlq.StateDiscarded {
				want, ends = 0, 0
			}
			all, exact := p.effectsOf(t, l.MessageID+" "), p.effectsOf(t, l.MessageID+" "+payload)
			if all != want || exact != want {
				t.Errorf("%s is %s: %d effects, %d of its last content, want %d", l.MessageID, l.State, all, exact, want)
			}
			entries, err := log.List(t.Context(), audit.Filter{Subject: fmt.Sprint("dead_letter ", id), Limit: 1000})
			expectNoError(t, err)
			acts := 0
			for _, e := range entries {
				if !strings.HasSuffix(e.Action, ".import") {
					acts++
				}
			}
			if changes := l.Version - 1 - ends; acts != changes {
				t.Errorf("%s: %d acts changed its state, %d are audited", l.MessageID, changes, acts)
			}
		}
	})
}

func (p *testDB) effectsOf(t *testing.T, prefix string) int {
	t.Helper()
	return p.count(t, `select count(*) from effects where substr(message_id, 1, length($1)) = $1`, prefix)
}
