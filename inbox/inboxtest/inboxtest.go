package inboxtest

import (
	"context"
	"runtime"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/outbox"
)

// Test describes a handler and how to see what it did. Middleware, Handler and NewMessage
// are required, and at least one of Effects and Outbox.
type Test struct {
	// Middleware is that of the inbox: in.Middleware or in.GroupMiddleware.
	Middleware message.HandlerMiddleware

	// Handler is the handler under test.
	Handler message.HandlerFunc

	// NewMessage returns a new message that the handler can handle. It is called once for
	// each scenario.
	NewMessage func() *message.Message

	// Effects returns the number of effects so far. Each message must add one. Default:
	// effects are not counted.
	Effects func() int

	// Outbox is that of inbox.Config.Outbox. The messages that the handler produces must be
	// in it once per handled message, the same number in every scenario. No relay may run
	// on it meanwhile. Default: produced messages are not checked.
	Outbox *outbox.Outbox

	// Topic is the publish topic of the handler, as in message.Router.AddHandler. Required
	// for a handler that returns messages.
	Topic string

	// Produced checks the messages that were produced for one message, in the order of
	// their ids. It is called once for each scenario, with messages as they are stored.
	// Default: only their number is checked.
	Produced func(t testing.TB, of *message.Message, produced []Produced)
}

// Produced is a message in the outbox.
type Produced struct {
	Topic   string
	Key     string // its ordering key, "" for none
	Message *message.Message
}

// copies is how many copies of a message are delivered at once.
const copies = 10

// Run delivers one message in each of these scenarios, and fails t unless each has exactly
// one effect:
//
//   - a message and a copy, one after the other;
//   - 10 copies at once, each delivered again until it is acknowledged;
//   - a crash after the handler has returned and before the commit;
//   - a crash after the commit and before the acknowledgement;
//   - a connection that is lost before the COMMIT reaches the database;
//   - a connection that is lost before the answer to the COMMIT arrives.
func Run(t testing.TB, test Test) {
	t.Helper()
	switch {
	case test.Middleware == nil, test.Handler == nil, test.NewMessage == nil:
		t.Errorf("inboxtest: Middleware, Handler and NewMessage are required")
		return
	case test.Effects == nil && test.Outbox == nil:
		t.Errorf("inboxtest: set Effects or Outbox, or nothing is checked")
		return
	}
	r := &run{TB: t, Test: test, handle: test.Middleware(test.Handler), ctx: contextOf(t, test.Topic)}
	for i, s := range []struct {
		name    string
		deliver func(msg *message.Message)
	}{
		{"twice", r.twice},
		{"in 10 copies at once", r.atOnce},
		{"with a crash before the commit", r.crashBeforeCommit},
		{"with a crash before the acknowledgement", r.crashBeforeAck},
		{"with a COMMIT that does not arrive", r.lost(boundtx.FaultNotSent)},
		{"with a COMMIT whose answer is lost", r.lost(boundtx.FaultNotAnswered)},
	} {
		r.scenario(i, s.name, s.deliver)
	}
}

type run struct {
	testing.TB
	Test
	handle message.HandlerFunc
	ctx    context.Context //nolint:containedctx // of every delivery of this test
	want   int             // produced by the message of the first scenario
}

// scenario delivers one message and checks what it has left.
func (r *run) scenario(i int, name string, deliver func(*message.Message)) {
	r.Helper()
	msg := r.NewMessage()
	effects := 0
	if r.Effects != nil {
		effects = r.Effects()
	}
	before := r.stored()
	deliver(msg)
	if r.Effects != nil {
		if n := r.Effects() - effects; n != 1 {
			r.Errorf("delivered %s: %d effects, want 1", name, n)
		}
	}
	if r.Outbox == nil {
		return
	}
	produced := newSince(before, r.stored())
	if i == 0 {
		r.want = len(produced)
	}
	if len(produced) != r.want {
		r.Errorf("delivered %s: %d messages in the outbox, want %d as in the first scenario", name, len(produced), r.want)
	}
	for i, p := range produced {
		if slices.ContainsFunc(produced[:i], func(o Produced) bool { return o.Message.UUID == p.Message.UUID }) {
			r.Errorf("delivered %s: message %s is in the outbox more than once", name, p.Message.UUID)
		}
	}
	if r.Produced != nil {
		r.Produced(r, msg, produced)
	}
}

// deliver delivers a copy of msg, again if the broker has delivered it before.
func (r *run) deliver(ctx context.Context, h message.HandlerFunc, msg *message.Message, again bool) error {
	_, err := h(deliveryOf(ctx, msg, again))
	return err
}

func (r *run) twice(msg *message.Message) {
	r.Helper()
	for n := range 2 {
		if err := r.deliver(r.ctx, r.handle, msg, n > 0); err != nil {
			r.Errorf("delivery %d: %v", n+1, err)
		}
	}
}

func (r *run) crashBeforeCommit(msg *message.Message) {
	r.Helper()
	crash(func() {
		_ = r.deliver(r.ctx, r.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			if _, err := r.Handler(msg); err != nil {
				r.Errorf("before the crash: %v", err)
			}
			runtime.Goexit()
			return nil, nil
		}), msg, false)
	})
	r.afterwards(msg)
}

func (r *run) crashBeforeAck(msg *message.Message) {
	r.Helper()
	crash(func() {
		if err := r.deliver(r.ctx, r.handle, msg, false); err != nil {
			r.Errorf("before the crash: %v", err)
		}
		runtime.Goexit()
	})
	r.afterwards(msg)
}

// lost loses the connection at the commit. A redelivery is handled outside of groups, so
// the commit is that of this message.
func (r *run) lost(fault boundtx.Fault) func(*message.Message) {
	return func(msg *message.Message) {
		r.Helper()
		if err := r.deliver(boundtx.WithFault(r.ctx, fault), r.handle, msg, true); err == nil {
			r.Errorf("acknowledged, although the answer to the COMMIT was lost")
		}
		r.afterwards(msg)
	}
}

// afterwards delivers msg again.
func (r *run) afterwards(msg *message.Message) {
	r.Helper()
	if err := r.deliver(r.ctx, r.handle, msg, true); err != nil {
		r.Errorf("delivered again: %v", err)
	}
}

// crash runs a delivery in its own goroutine, which the delivery may end.
func crash(deliver func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		deliver()
	}()
	<-ended
}
