package rabbitmq

import (
	"context"
	"sync"
	"sync/atomic"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill/relay"
)

// Sink publishes the relay's messages to RabbitMQ. It is a [relay.Sink], and safe for
// concurrent use.
type Sink struct {
	settings *settings
	current  atomic.Pointer[running] // nil while Run is not running
}

var _ relay.Sink = (*Sink)(nil)

// New returns a sink that publishes as cfg configures it, with its exchange, routing keys,
// marshaler and connection settings. It does no I/O: if the broker cannot be reached, Run
// finds out and tries again. All bad values are reported at once, each as a
// *oncemill.ConfigError.
//
// Confirms are always awaited, and messages are always published persistent and mandatory,
// regardless of cfg.Publish and the marshaler; ChannelPoolSize has no effect. Marshaler,
// TopologyBuilder, GenerateName and GenerateRoutingKey are called concurrently; the names must
// depend on the topic alone. A TopologyBuilder must return when its channel is closed: a declaration
// that does not return keeps Run from returning, and costs the connection each CallTimeout.
func New(cfg wamqp.Config, opts Config) (*Sink, error) {
	s, err := resolve(cfg, opts)
	if err != nil {
		return nil, err
	}
	return &Sink{settings: s}, nil
}

// Run keeps a connection to the broker until ctx ends, reconnecting as often as needed,
// and then returns nil. Messages without an outcome at that time are unavailable. A second
// Run at the same time returns [ErrRunning].
func (s *Sink) Run(ctx context.Context) error {
	r := newRunning(s.settings)
	if !s.current.CompareAndSwap(nil, r) {
		return ErrRunning
	}
	defer s.current.Store(nil)

	var group sync.WaitGroup
	group.Go(func() { r.connect(ctx, &group) })
	for ctx.Err() == nil {
		for _, l := range r.created.take(nil) {
			group.Go(func() { l.run(ctx) })
		}
		select {
		case <-ctx.Done():
		case <-r.created.wake:
		}
	}
	// Lanes created in the meantime only give their messages back.
	for _, l := range r.close() {
		group.Go(func() { l.run(ctx) })
	}
	group.Wait()
	return nil
}

// Publish passes messages of one lane to that lane's goroutine; see [relay.Sink]. done is
// called before Publish returns only if the sink is not running.
func (s *Sink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	if len(msgs) == 0 {
		return
	}
	if r := s.current.Load(); r != nil {
		if l := r.lane(msgs[0].Lane); l != nil && l.inbox.put(newBatch(ctx, msgs, done)) {
			return
		}
	}
	for _, m := range msgs {
		done(m, unavailableNotRunning)
	}
}

// Ready reports whether the sink is connected and the broker accepts messages. A relay
// that checks it can leave its lanes to a worker in a better position.
func (s *Sink) Ready() bool {
	r := s.current.Load()
	if r == nil {
		return false
	}
	l := r.state.Load().link
	return l != nil && !l.blocked.Load()
}
