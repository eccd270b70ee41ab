package inbox

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// PerHandler is a Watermill message.HandlerMiddleware for a whole router, such as one that
// a CQRS processor fills. Each handler becomes a consumer of its own, so that several
// handlers of one event all receive it. The consumer's name is Config.Consumer, a slash,
// and the name of the handler in the router, which therefore must stay the same across
// restarts.
//
//	router.AddMiddleware(in.PerHandler)
//
// Otherwise it works like [Inbox.Middleware]. Run of this inbox serves the consumers of
// all its handlers.
func (in *Inbox) PerHandler(h message.HandlerFunc) message.HandlerFunc {
	in.perHandler.Store(true)
	var once sync.Once
	var handle message.HandlerFunc
	var bad error
	return func(msg *message.Message) ([]*message.Message, error) {
		once.Do(func() {
			var own *Inbox
			if own, bad = in.derive(msg.Context()); bad == nil {
				handle = own.Middleware(h)
			}
		})
		if bad != nil {
			return nil, bad
		}
		return handle(msg)
	}
}

// derive returns the inbox of the handler whose message has this context.
func (in *Inbox) derive(ctx context.Context) (*Inbox, error) {
	name := message.HandlerNameFromCtx(ctx)
	if name == "" {
		return nil, ErrNoHandler
	}
	cfg := in.given
	cfg.Consumer += "/" + name
	own, err := New(in.db, cfg)
	if err != nil {
		return nil, err
	}
	own.parent = in.cfg.Consumer
	in.mu.Lock()
	defer in.mu.Unlock()
	in.derived = append(in.derived, own)
	return own, nil
}

// family returns this inbox and those of its handlers.
func (in *Inbox) family() []*Inbox {
	in.mu.Lock()
	defer in.mu.Unlock()
	return append([]*Inbox{in}, in.derived...)
}
