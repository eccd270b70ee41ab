package demo

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/relay"
)

var errHeld = errors.New("demo: held for the kill that did not come")

// Sink returns inner with [StageRelay] behind it: from the parent's word on, the
// broker's confirmations stay here.
func (w *Worker) Sink(inner relay.Sink) relay.Sink { return holdingSink{inner, w} }

type holdingSink struct {
	relay.Sink
	worker *Worker
}

func (s holdingSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.Sink.Publish(ctx, msgs, func(m *relay.Message, err error) {
		if err != nil || !s.worker.stand(StageRelay, m.MessageID) {
			done(m, err)
			return
		}
		// A sink owes an outcome by the end of ctx, also this one.
		context.AfterFunc(ctx, func() { done(m, relay.Unavailable(errHeld)) })
	})
}

// Middleware is [StageConsumer] as a Watermill middleware: put it in front of the
// one whose commit it is to follow.
func (w *Worker) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		if err == nil && w.stand(StageConsumer, msg.UUID) {
			<-msg.Context().Done()
			return nil, errHeld
		}
		return produced, err
	}
}
