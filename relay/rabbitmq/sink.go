package rabbitmq

import (
	"context"
	"sync"
	"sync/atomic"

	wamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"

	"github.com/oncemill/oncemill/relay"
)

// Sink publishes the relay's messages to RabbitMQ. It is a [relay.Sink]; all
// methods may be called from any goroutine.
type Sink struct {
	settings *settings
	current  atomic.Pointer[running] // nil while Run is not running
}

var _ relay.Sink = (*Sink)(nil)

// New returns a sink that publishes where cfg says, with its exchange, its
// routing keys, its marshaler and its connection settings. It does no I/O: a
// broker that cannot be reached is met, and tried again, by Run. All bad values
// come back together, each a *oncemill.ConfigError.
//
// Confirms are always awaited and messages always published persistent and
// mandatory, whatever cfg.Publish and the marshaler say of it; ChannelPoolSize
// has no meaning here. Marshaler, GenerateName and GenerateRoutingKey are called
// from several goroutines at once; the names must depend on the topic alone.
func New(cfg wamqp.Config, opts Config) (*Sink, error) {
	s, err := resolve(cfg, opts)
	if err != nil {
		return nil, err
	}
	return &Sink{settings: s}, nil
}

// Run keeps a connection to the broker until ctx ends, reconnecting as often as
// it takes, and then returns nil. Messages without an outcome at that time are
// unavailable. A second Run at the same time returns [ErrRunning].
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
	// Lanes that came in the meantime only give their messages back.
	for _, l := range r.close() {
		group.Go(func() { l.run(ctx) })
	}
	group.Wait()
	return nil
}

// Publish hands messages of one lane over to that lane's goroutine; see
// [relay.Sink]. Only if the sink is not running is done called before it
// returns.
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

// Ready reports whether the sink is connected and the broker accepts messages.
// A relay that asks can leave its lanes to a worker that is better placed.
func (s *Sink) Ready() bool {
	r := s.current.Load()
	if r == nil {
		return false
	}
	l := r.state.Load().link
	return l != nil && !l.blocked.Load()
}
