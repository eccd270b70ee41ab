package inboxtest

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
)

// attemptsAtMost is the number of deliveries after which a copy counts as never handled.
const attemptsAtMost = 100

// Twice delivers a message and a copy of it, one after the other.
func Twice(t testing.TB, middleware message.HandlerMiddleware, h message.HandlerFunc, msg *message.Message) {
	t.Helper()
	handle := middleware(h)
	for n := range 2 {
		if _, err := handle(redelivery(t, msg, n > 0)); err != nil {
			t.Errorf("delivery %d: %v", n+1, err)
		}
	}
}

// Concurrently delivers n copies of a message at once, and delivers each again until it is
// acknowledged.
func Concurrently(t testing.TB, n int, middleware message.HandlerMiddleware, h message.HandlerFunc, msg *message.Message) {
	t.Helper()
	handle := middleware(h)
	var copies sync.WaitGroup
	for range n {
		copies.Go(func() {
			for attempt := 0; ; attempt++ {
				_, err := handle(redelivery(t, msg, attempt > 0))
				if err == nil {
					return
				}
				if !errors.Is(err, inbox.ErrBeingHandled) || attempt == attemptsAtMost {
					t.Errorf("copy, delivery %d: %v", attempt+1, err)
					return
				}
			}
		})
	}
	copies.Wait()
}

// CrashBeforeCommit delivers a message, crashes after its handler has returned and before
// the commit, and delivers it again.
func CrashBeforeCommit(t testing.TB, middleware message.HandlerMiddleware, h message.HandlerFunc, msg *message.Message) {
	t.Helper()
	crash(func() {
		_, _ = middleware(func(msg *message.Message) ([]*message.Message, error) {
			_, err := h(msg)
			if err != nil {
				t.Errorf("before the crash: %v", err)
			}
			runtime.Goexit()
			return nil, nil
		})(redelivery(t, msg, false))
	})
	if _, err := middleware(h)(redelivery(t, msg, true)); err != nil {
		t.Errorf("after the crash: %v", err)
	}
}

// CrashBeforeAck delivers a message, crashes after the commit and before the
// acknowledgement, and delivers it again.
func CrashBeforeAck(t testing.TB, middleware message.HandlerMiddleware, h message.HandlerFunc, msg *message.Message) {
	t.Helper()
	handle := middleware(h)
	crash(func() {
		if _, err := handle(redelivery(t, msg, false)); err != nil {
			t.Errorf("before the crash: %v", err)
		}
		runtime.Goexit()
	})
	if _, err := handle(redelivery(t, msg, true)); err != nil {
		t.Errorf("after the crash: %v", err)
	}
}

// OneEffect does all of the above, each with a new message. It fails the test unless each
// message adds one to effects.
func OneEffect(t testing.TB, middleware message.HandlerMiddleware, h message.HandlerFunc, newMessage func() *message.Message, effects func() int) {
	t.Helper()
	for _, play := range []struct {
		name string
		run  func(msg *message.Message)
	}{
		{"twice", func(msg *message.Message) { Twice(t, middleware, h, msg) }},
		{"10 times at once", func(msg *message.Message) { Concurrently(t, 10, middleware, h, msg) }},
		{"with a crash before the commit", func(msg *message.Message) { CrashBeforeCommit(t, middleware, h, msg) }},
		{"with a crash before the acknowledgement", func(msg *message.Message) { CrashBeforeAck(t, middleware, h, msg) }},
	} {
		before := effects()
		play.run(newMessage())
		if n := effects() - before; n != 1 {
			t.Errorf("delivered %s: %d effects", play.name, n)
		}
	}
}

// crash runs a delivery in a goroutine of its own, which the delivery may end.
func crash(deliver func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		deliver()
	}()
	<-ended
}

// redelivery returns a copy of msg as a subscriber would deliver it.
func redelivery(t testing.TB, msg *message.Message, again bool) *message.Message {
	c := msg.Copy()
	c.SetContext(inbox.ContextWithDelivery(t.Context(), delivery(again)))
	return c
}

// delivery reports whether it is a redelivery.
type delivery bool

func (d delivery) Redelivered() bool       { return bool(d) }
func (d delivery) ArrivedAt() time.Time    { return time.Time{} }
func (d delivery) CreatedAt() time.Time    { return time.Time{} }
func (d delivery) DelayNack(time.Duration) {}
func (d delivery) GiveWay()                {}
func (d delivery) Nacks() int              { return 0 }
