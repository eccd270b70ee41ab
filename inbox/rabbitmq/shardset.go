package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sleep"
)

// shardSet is one Subscribe of a topic with shards: a subscription for each shard. They hand
// out on one channel, as many messages together as the prefetch.
type shardSet struct {
	owner *Subscriber
	topic string
	out   chan *message.Message
	slots chan struct{}

	layout layout  // that is consumed
	next   *layout // that comes after it; nil if there is none

	mu     sync.Mutex
	shards map[int]*subscription // by number; those with a consumer, active or not
}

// member is the subscription to a shard, with its first session; nil if that is to be opened.
type member struct {
	number int
	sub    *subscription
	first  *session
}

func (s *Subscriber) subscribeShards(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if err := s.hold(); err != nil {
		return nil, err
	}
	set := s.newShardSet(topic)
	members, err := set.begin(ctx)
	if err != nil {
		s.group.Done()
		return nil, fmt.Errorf("rabbitmq: subscribe to the shards of %q: %w", topic, err)
	}
	go func() { // Close waits for it
		defer s.group.Done()
		set.run(ctx, members)
	}()
	return set.out, nil
}

func (s *Subscriber) newShardSet(topic string) *shardSet {
	return &shardSet{
		owner:  s,
		topic:  topic,
		out:    make(chan *message.Message),
		slots:  make(chan struct{}, s.settings.topology.Consume.Qos.PrefetchCount),
		shards: make(map[int]*subscription),
	}
}

func (s *Subscriber) initializeShards(topic string) error {
	l, err := s.settings.layout(topic)
	if err != nil {
		return err
	}
	if s.settings.Shards.Previous > 0 {
		return s.prepareShards(untilClosed{s.closing}, l)
	}
	return s.declareAndBind(untilClosed{s.closing}, topic, l)
}

// prepareShards declares the shards of l, to which no messages are led yet.
func (s *Subscriber) prepareShards(ctx context.Context, l layout) error {
	if err := s.declare(ctx, func(c *amqp.Channel) error { return s.settings.declareHashes(c, l) }); err != nil {
		return err
	}
	for i := range l.count {
		err := s.declare(ctx, func(c *amqp.Channel) error { return s.settings.declareShard(c, l, i) })
		// It exists with its bindings if the entry does, which is the last to be declared.
		if err != nil && (!isDown(err) || s.declare(ctx, l.exists) != nil) {
			return err
		}
	}
	return s.declare(ctx, func(c *amqp.Channel) error { return s.settings.declareEntry(c, l) })
}

// declare takes one step after the other, each within Config.CallTimeout. It does not use the
// connection of the consumers, since the broker closes a connection that declares an unknown
// type of exchange.
func (s *Subscriber) declare(ctx context.Context, steps ...func(*amqp.Channel) error) error {
	for _, step := range steps {
		err := s.onChannel(ctx, s.publishing, func(_ *link, channel *amqp.Channel) error {
			return nopanic.Call(func() error { return step(channel) })
		})
		if err != nil {
			return explained(err)
		}
	}
	return nil
}

// declareAndBind makes l the layout of the topic. It returns ErrShardCount if another one is.
func (s *Subscriber) declareAndBind(ctx context.Context, topic string, l layout) error {
	if err := s.declare(ctx, l.guard); err != nil {
		return err
	}
	if err := s.prepareShards(ctx, l); err != nil {
		return err
	}
	return s.declare(ctx, func(c *amqp.Channel) error { return s.settings.bindShards(c, topic, l) })
}

// begin begins with the shards of Shards.Previous that still exist. If there are none, or
// there is no Previous, it begins with those of Count.
func (set *shardSet) begin(ctx context.Context) ([]member, error) {
	next, err := set.owner.settings.layout(set.topic)
	if err != nil {
		return nil, err
	}
	previous := set.owner.settings.Shards.Previous
	if previous == 0 {
		set.layout = next
		return set.beginLast(ctx)
	}
	if err := set.owner.prepareShards(ctx, next); err != nil {
		return nil, err
	}
	set.layout, set.next = layout{next.base, previous}, &next
	members, err := set.open(ctx)
	if err != nil || len(members) > 0 {
		return members, err
	}
	set.layout, set.next = next, nil
	return set.beginLast(ctx)
}

func (set *shardSet) beginLast(ctx context.Context) ([]member, error) {
	if err := set.owner.declareAndBind(ctx, set.topic, set.layout); err != nil {
		return nil, err
	}
	return set.open(ctx)
}

// open begins to consume from all shards that exist. One that cannot be opened now keeps none of
// the others: run opens it later. It fails if none can be opened.
func (set *shardSet) open(ctx context.Context) ([]member, error) {
	var members []member
	var missing []int
	var failed error
	for i := range set.layout.count {
		if !isAnswer(failed) { // there is no connection, and each would wait for one
			missing = append(missing, i)
			continue
		}
		m, err := set.openShard(ctx, i)
		switch {
		case err == nil:
			members = append(members, m)
		case set.next == nil || !errors.Is(err, errShardGone):
			missing, failed = append(missing, i), err
		}
	}
	if len(members) == 0 {
		return nil, failed
	}
	for _, i := range missing {
		if m, err := set.newMember(i); err == nil { // otherwise closed, and run ends at once
			set.enter(m)
			members = append(members, m)
		}
	}
	return members, nil
}

func (set *shardSet) openShard(ctx context.Context, i int) (member, error) {
	m, err := set.newMember(i)
	if err != nil {
		return m, err
	}
	if m.first, err = m.sub.open(ctx); err != nil {
		set.owner.end(m.sub)
		return member{}, err
	}
	set.enter(m)
	return m, nil
}

// newMember makes a subscription, for whose end Close waits.
func (set *shardSet) newMember(i int) (member, error) {
	s := set.owner
	if err := s.hold(); err != nil {
		return member{}, err
	}
	return member{number: i, sub: s.newShard(set.topic, set.layout.queue(i), set.out, set.slots, set.next)}, nil
}

func (set *shardSet) enter(m member) {
	set.owner.enter(m.sub)
	set.mu.Lock()
	defer set.mu.Unlock()
	set.shards[m.number] = m.sub
}

func (set *shardSet) end(m member) {
	set.mu.Lock()
	delete(set.shards, m.number)
	set.mu.Unlock()
	set.owner.end(m.sub)
}

// run consumes until ctx ends or the subscriber is closed.
func (set *shardSet) run(ctx context.Context, members []member) {
	defer close(set.out)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // ends with this function, which cancels ctx
		select {
		case <-set.owner.closing:
			stop()
		case <-ctx.Done():
		}
	}()
	for {
		if drained := set.consume(ctx, members); !drained || ctx.Err() != nil {
			return
		}
		// The previous shards do not exist any more, so everything in them was settled, by
		// whichever process. Only now a message that came after them may be handled.
		set.layout, set.next = *set.next, nil
		set.owner.settings.Logger.InfoContext(ctx, "previous shards are drained; consuming the new ones", "topic", set.topic, "shards", set.layout.count)
		var err error
		if members, err = retried(ctx, set, func() ([]member, error) { return set.beginLast(ctx) }); err != nil {
			return // ctx has ended, or the subscriber is closed
		}
	}
}

// consume keeps all shards of the layout until ctx ends, the subscriber is closed, or none of them
// exists, which it reports.
func (set *shardSet) consume(ctx context.Context, members []member) (drained bool) {
	ctx, stop := context.WithCancel(ctx)
	var balancing sync.WaitGroup
	balancing.Go(func() { set.balance(ctx) })
	var keeping sync.WaitGroup
	var gone atomic.Int64
	for _, m := range members {
		keeping.Go(func() {
			if set.keep(ctx, m) {
				gone.Add(1)
			}
		})
	}
	keeping.Wait()
	stop()
	balancing.Wait()
	return int(gone.Load()) == len(members)
}

// keep consumes from one shard. When it is handed over, it gets in line again. It reports whether
// the shard is gone, with another layout to come.
func (set *shardSet) keep(ctx context.Context, m member) (gone bool) {
	for {
		m.sub.run(ctx, m.first)
		set.end(m)
		if m.sub.shard.gone && set.next != nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		var err error
		m, err = retried(ctx, set, func() (member, error) {
			again, err := set.openShard(ctx, m.number)
			if errors.Is(err, errShardGone) && set.next == nil { // somebody has deleted it
				err = errors.Join(err, set.owner.declareAndBind(ctx, set.topic, set.layout))
			}
			return again, err
		})
		if err != nil { // ctx has ended, the subscriber is closed, or the shard is gone
			return set.next != nil && errors.Is(err, errShardGone)
		}
	}
}

// retried calls open until it succeeds, ctx ends, the subscriber is closed, or the shard is drained.
// Until then the subscriber is not ready.
func retried[T any](ctx context.Context, set *shardSet, open func() (T, error)) (T, error) {
	set.owner.opening.Add(1)
	defer set.owner.opening.Add(-1)
	settings := set.owner.settings
	wait := settings.conn.Backoff
	wait.Reset()
	for failures := 1; ; failures++ {
		opened, err := open()
		if err == nil || errors.Is(err, ErrClosed) || set.next != nil && errors.Is(err, errShardGone) {
			return opened, err
		}
		if failures == 1 && ctx.Err() == nil {
			settings.Logger.WarnContext(ctx, "rabbitmq consume failed, retrying", "topic", set.topic, "uri", settings.conn.Shown(), "error", err)
		}
		if !sleep.For(ctx, wait.NextBackOff()) {
			return opened, ctx.Err()
		}
	}
}
