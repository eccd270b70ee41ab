package inbox

import (
	"context"
	"time"
)

// Delivery is what a subscriber knows about a delivery besides the message. A subscriber
// puts it into the context of the message with [ContextWithDelivery]; the one in
// inbox/rabbitmq does. An inbox works without it. Then it counts no crashes, and the
// subscriber alone decides when a delayed redelivery happens.
//
// A Delivery may also have the method Leaving() <-chan struct{}, whose channel is closed when the
// subscriber stops. Deliveries of a paused consumer are then given back at once.
type Delivery interface {
	// Redelivered reports whether the broker may have delivered the message before, to this
	// consumer or another, so that a process may have crashed on it.
	Redelivered() bool

	// ArrivedAt returns when the delivery arrived in this process. Zero if unknown. A group
	// takes the oldest first, since a subscriber may acknowledge a run of deliveries at
	// once, up to the first that is not handled.
	ArrivedAt() time.Time

	// CreatedAt returns when the message was created, by the clock of its producer's
	// database, as sent by a relay. Zero if unknown.
	CreatedAt() time.Time

	// DelayNack asks that the message, if it is nacked, is not delivered again before d has
	// passed. The last call counts.
	DelayNack(d time.Duration)

	// Nacks returns how often this process has nacked the delivery before. Groups do not
	// include a delivery that was nacked.
	Nacks() int

	// Yield asks that later messages of the same ordering key are delivered while this
	// one, if it is nacked, waits for its redelivery.
	Yield()
}

type deliveryKey struct{}

// ContextWithDelivery returns a context that carries d, for its message.
func ContextWithDelivery(ctx context.Context, d Delivery) context.Context {
	return context.WithValue(ctx, deliveryKey{}, d)
}

// DeliveryFromContext returns what [ContextWithDelivery] put into ctx.
func DeliveryFromContext(ctx context.Context) (Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(Delivery)
	return d, ok
}
