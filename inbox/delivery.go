package inbox

import (
	"context"
	"time"
)

// Delivery is what a subscriber knows of a delivery beside the message. A
// subscriber that has something to tell puts it into the context of the message
// with [ContextWithDelivery]; the one in inbox/rabbitmq does. An inbox works
// without it: then it counts no crashes, and a delayed redelivery comes as soon
// as the subscriber likes.
type Delivery interface {
	// Redelivered reports that the broker may have delivered the message before,
	// to this consumer or another, so that a process may have died of it.
	Redelivered() bool

	// ArrivedAt returns when the delivery came to this process: a group takes the
	// oldest first, since a broker may be told of a row of deliveries at once, up to
	// the first that is not handled. Zero if that is not known.
	ArrivedAt() time.Time

	// CreatedAt returns when the message was created by the clock of its
	// producer's database, as a relay tells it. Zero if that is not known.
	CreatedAt() time.Time

	// DelayNack asks that the message, if it is nacked, be delivered again after
	// d and not before. The last call counts.
	DelayNack(d time.Duration)

	// Nacks returns how often this process has nacked the delivery before. Groups take
	// no delivery that was nacked.
	Nacks() int

	// GiveWay asks that later messages of the same ordering key be delivered
	// while this one, if it is nacked, waits for its redelivery.
	GiveWay()
}

type deliveryKey struct{}

// ContextWithDelivery returns a context for the message of d.
func ContextWithDelivery(ctx context.Context, d Delivery) context.Context {
	return context.WithValue(ctx, deliveryKey{}, d)
}

// DeliveryFromContext returns what [ContextWithDelivery] put into ctx.
func DeliveryFromContext(ctx context.Context) (Delivery, bool) {
	d, ok := ctx.Value(deliveryKey{}).(Delivery)
	return d, ok
}
