package rabbitmq

import (
	"context"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/metric"
)

// KeyHeader is the header, and therefore the metadata, in which a relay sends the ordering
// key of a message.
const KeyHeader = "oncemill_key"

// Config holds the settings that watermill-amqp's configuration does not have. The zero
// value is right for most services.
type Config struct {
	// Addresses are further AMQP URIs of the same broker, for example of other nodes of a
	// cluster. They are tried in turn, after amqp.Config.Connection.AmqpURI (which may then
	// be empty): the next one when an address cannot be reached, and when a connection is
	// lost. All must name the same virtual host. A node that accepts connections but does
	// not answer costs DialTimeout. Default: none.
	Addresses []string

	// AllowPlaintext permits an amqp:// URI whose host is not the loopback interface.
	// Credentials and payloads then cross the network unencrypted. Default: such a URI is a
	// configuration error.
	AllowPlaintext bool

	// Key returns the ordering key of a message, "" for none. Messages of one key are handed
	// out one at a time, in the order of their delivery. Each subscription calls it from one
	// goroutine. Default: the metadata [KeyHeader].
	Key func(*message.Message) string

	// Malformed takes a delivery that the marshaler could not read, or on which Key
	// panicked, with the error (or an *oncemill.PanicError). One of them may also have ended
	// its goroutine. The message is as [Marshaler] reads it: with all headers as metadata and
	// the body unchanged. Malformed runs in a goroutine of its own. Returning nil acknowledges
	// the delivery, so store it first; inbox.Inbox.Refuse does. After an error, or if it ends
	// its goroutine, it is called again, with the delays of NackDelay. If it does not return,
	// Close waits for it as for a handler. Default: the delivery stays unacknowledged in its
	// queue, is logged, and is tried again with the same delays.
	Malformed func(ctx context.Context, msg *message.Message, reason error) error

	// NackDelay is the time from a nack to the redelivery of the message if its handler has
	// not asked for another (inbox.Delivery). It doubles with every nack of the same
	// delivery, up to NackDelayMax. Meanwhile the message keeps its place in the prefetch
	// and among the messages of its key; other messages continue. Default: 100 ms. At least
	// 1 ms.
	NackDelay time.Duration

	// NackDelayMax is the longest of these times. Default: 10 s, or NackDelay if
	// that is longer.
	NackDelayMax time.Duration

	// Backlog is how many deliveries may wait in this process, beside the prefetch, for one
	// of their key that was nacked or is being handled for more than a second. It lets other
	// keys continue; at most 64 MiB of payloads wait. These deliveries are taken by
	// consumers that the subscriber adds on its channel. A queue with a single active
	// consumer, or an exclusive one, does not allow them: there the prefetch is the bound.
	// Beyond the bound a delayed key delays the others. Default: 10,000. At least 1. Raising
	// it costs memory, and as many more deliveries are repeated after a crash.
	Backlog int

	// AckTimeout is how long a delivery may remain unacknowledged. It must be less than the
	// broker's consumer_timeout, which closes the channel of a consumer that takes longer;
	// that is 30 min by default. The context of a message ends with it. A delivery that is
	// not being handled goes back to the queue before that, with all of its key, in its
	// order, and comes again: at once, or from a quorum queue without x-delivery-limit after all
	// that waits in it. So a message may wait for longer (inbox.RetryAfter),
	// but each time counts for x-delivery-limit. Later messages of its key wait for it, at
	// most CallTimeout or a quarter of AckTimeout: by then another consumer has it, or so many
	// messages are before it that they overtake it. If
	// messages wait for a handler that has not returned by then, or it holds the last place in
	// the prefetch, all of the subscription goes back. Default: 25 min. At least 1 s.
	AckTimeout time.Duration

	// Shards divides the messages of each topic among several queues, on which several
	// processes work in order. Default: one queue.
	Shards Shards

	// CloseTimeout is how much time Close, and the end of the context given to Subscribe,
	// give to running handlers. Then the contexts of their messages end and the messages go
	// back to the queue. Default: 10 s.
	CloseTimeout time.Duration

	// DialTimeout bounds connecting to one address: TCP, TLS and AMQP handshake together.
	// Default: connection_timeout of the URI, else 10 s.
	DialTimeout time.Duration

	// CallTimeout bounds each request that the broker answers. A connection that
	// does not answer in time is dropped. Default: 10 s.
	CallTimeout time.Duration

	// MeterProvider receives the metric oncemill.inbox.queue_depth: how many messages wait in each
	// queue. Once somebody collects the metrics, the subscriber has one more connection, over
	// which it asks the broker every five seconds while they are collected. Default: otel.GetMeterProvider().
	MeterProvider metric.MeterProvider

	// Logger receives events: connections and consumers lost and regained, malformed
	// deliveries. Default: slog.Default().
	Logger *slog.Logger
}

const (
	defaultNackDelay    = 100 * time.Millisecond
	defaultNackDelayMax = 10 * time.Second
	defaultAckTimeout   = 25 * time.Minute
	defaultBacklog      = 10_000
	defaultCloseTimeout = 10 * time.Second
	defaultCallTimeout  = 10 * time.Second
)
