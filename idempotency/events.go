package idempotency

import (
	"context"
	"log/slog"
	"sync"

	"github.com/oncemill/oncemill/internal/repeats"
)

// Events that requests and commands share.
const (
	eventMismatch  = "key reused with another request"
	eventConflict  = "key is being processed"
	eventScope     = "idempotency scope failed"
	eventBodyTaken = "request body was read before the idempotency middleware"
)

// events limits lines that repeat. There are as many as the package has messages.
type events struct{ known sync.Map }

func (e *events) of(event string) *repeats.Series {
	if s, ok := e.known.Load(event); ok {
		return s.(*repeats.Series) //nolint:errcheck // nothing else is stored
	}
	s, _ := e.known.LoadOrStore(event, &repeats.Series{})
	return s.(*repeats.Series) //nolint:errcheck // nothing else is stored
}

// logScope logs that Config.Scope returned an error, before there is an intent.
func (c *core) logScope(ctx context.Context, err error) {
	level, attrs := c.events.of(eventScope).Event(slog.LevelError, err.Error())
	c.cfg.Logger.Log(ctx, level, eventScope, append(attrs, "error", err)...)
}

// logBodyTaken logs that there is no body where one is needed. It repeats, since every client
// can cause it: an empty body that is chunked looks like one that was read.
func (x *exchange) logBodyTaken(ctx context.Context) {
	level, attrs := x.events.of(eventBodyTaken).Event(slog.LevelError, x.claim.Endpoint)
	x.cfg.Logger.Log(ctx, level, eventBodyTaken, append(attrs, "endpoint", x.claim.Endpoint,
		"problem", "move the middleware before whatever reads the body, or put the body back into the request, unless a client has sent an empty one")...)
}
