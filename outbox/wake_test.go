package outbox_test

import (
	"context"
	"database/sql"
	"sync"
	"testing"

	"github.com/oncemill/oncemill/internal/outboxqueue"
)

func TestWake_ReachesEveryListenerOnce(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		first, stopFirst := p.queue.Listen()
		second, stopSecond := outboxqueue.Of(p.box).Listen() // another relay
		defer stopSecond()
		for range 5 { // many become one; nobody listens in between
			p.box.Wake()
		}
		expectWake(t, first)
		expectWake(t, second)
		expectNoWake(t, first, "more than once")
		expectNoWake(t, second, "more than once")
		stopFirst()
		stopFirst() // harmless
		p.publish(t, newMessage("a", ""))
		expectNoWake(t, first, "after the end")
		expectWake(t, second)
	})
}

func TestWake_WithoutListenersIsNothing(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		p.box.Wake()
		wake, stop := p.queue.Listen()
		defer stop()
		expectNoWake(t, wake, "by what was before")
	})
}

// A commit while a listener is between two receives is not lost.
func TestWake_NoneIsLostBetweenTwoReceives(t *testing.T) {
	onEachDatabase(t, func(t *testing.T, p *fixture) {
		wake, stop := p.queue.Listen()
		defer stop()
		const writers, each = 3, 5
		var running sync.WaitGroup
		for range writers {
			running.Go(func() {
				for range each {
					err := p.box.RunInTx(t.Context(), func(_ context.Context, tx *sql.Tx) error {
						return p.box.Publisher(tx).Publish("orders", newMessage("a", ""))
					})
					expectNoError(t, err)
				}
			})
		}
		for seen := 0; seen < writers*each; {
			expectWake(t, wake)
			if t.Failed() {
				t.Errorf("saw %d rows", seen)
				break
			}
			seen = len(p.read(t))
		}
		running.Wait()
	})
}
