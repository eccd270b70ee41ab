package mill

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/testserver"
)

// A message that was taken from the subscriber as the service stopped is handled, or left to
// the subscriber; a nack could drop it.
func TestHandingOut_NacksNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	taken := 0
	for range 100 {
		messages, msg := make(chan *message.Message, 1), message.NewMessage("order 1", nil)
		messages <- msg
		h := handingOut{ctx, messages, make(chan struct{})}
		out, err := h.Subscribe(t.Context(), "orders")
		if err != nil {
			t.Fatal(err)
		}
		testserver.Pause(t.Context(), time.Millisecond) // nobody receives yet
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		for range out {
			taken++
		}
		select {
		case <-msg.Nacked():
			t.Fatal("the message was nacked")
		default:
		}
	}
	if taken == 0 {
		t.Error("no message was taken: the test shows nothing")
	}
}
