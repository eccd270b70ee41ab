package mill

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
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
		routerCtx, closeRouter := context.WithCancel(t.Context())
		out, err := handingOut{ctx, messages}.Subscribe(routerCtx, "orders")
		if err != nil {
			t.Fatal(err)
		}
		testserver.Pause(t.Context(), time.Millisecond) // nobody receives yet
		closeRouter()
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

// A router that closes while it starts does not always close its subscribers.
func TestHandingOut_EndsWithARouterThatClosesAtOnce(t *testing.T) {
	t.Parallel()
	for range 2000 {
		ctx, cancel := context.WithCancel(t.Context())
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: testserver.MaxWait}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		router.AddConsumerHandler("stock", "orders", handingOut{ctx, make(chan *message.Message)}, func(*message.Message) error { return nil })
		ended := make(chan error, 1)
		go func() { ended <- router.Run(t.Context()) }()
		<-router.Running()
		cancel()
		if err := router.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}
