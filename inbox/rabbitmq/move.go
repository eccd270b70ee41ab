package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
)

// overlap is how long messages go to the previous and to the new shards. A message that the
// broker had routed before that is in its queue by then, before the marker.
const overlap = time.Second

// markTries is how often a shard is marked until the broker confirms it, or has removed the shard.
const markTries = 5

// MoveShards leads the messages of a topic to the shards of Shards.Count in place of those of
// Shards.Previous. Call it once, in any process, when all processes run with Shards.Previous.
// Producers and consumers may continue. It takes a second. If it returns an error or is
// interrupted, call it again: each step may be repeated.
//
// Every key keeps its order, and no message is lost. For a moment messages go to the new
// shards and to the previous ones, and the inbox removes the duplicates; then only to the new
// ones. A marker in each previous shard shows consumers where it ends. When everything before
// it is settled, its consumer removes the shard. When no previous shard exists, the processes
// begin to consume the new ones.
func (s *Subscriber) MoveShards(ctx context.Context, topic string) error {
	n := s.settings.Shards
	if n.Previous == 0 {
		return &oncemill.ConfigError{Field: "rabbitmq.Config.Shards.Previous", Value: "0", Problem: "is required to move shards"}
	}
	if err := s.hold(); err != nil {
		return err
	}
	defer s.group.Done()
	next, err := s.settings.layout(topic)
	if err == nil {
		err = s.moveShards(ctx, topic, layout{next.base, n.Previous}, next)
	}
	if err != nil {
		return fmt.Errorf("rabbitmq: move the %d shards of %q to %d: %w", n.Previous, topic, n.Count, err)
	}
	return nil
}

func (s *Subscriber) moveShards(ctx context.Context, topic string, previous, next layout) error {
	if err := s.prepareShards(ctx, next); err != nil {
		return err
	}
	// From here on a process without Shards.Previous does not declare the previous shards
	// again.
	err := s.declare(ctx, deleteExchange(next.current()), next.guard,
		func(c *amqp.Channel) error { return s.settings.bindShards(c, topic, next) })
	if err != nil {
		return err
	}
	if !sleep.For(ctx, overlap) {
		return ctx.Err()
	}
	if err := s.declare(ctx, deleteExchange(previous.entry()), deleteExchange(previous.keys()), deleteExchange(previous.ids())); err != nil {
		return err
	}
	for i := range previous.count {
		mark := func(_ *link, channel *amqp.Channel) error {
			return s.put(channel, address{key: previous.queue(i)}, newMarker(true))
		}
		err := s.onChannel(ctx, s.publishing, mark)
		// RabbitMQ fails, or is silent, where a consumer removes the queue just then.
		for try := 1; errors.Is(err, errNotConfirmed) && try < markTries && sleep.For(ctx, overlap/10); try++ {
			err = s.onChannel(ctx, s.publishing, mark)
		}
		if errors.Is(err, errNoQueue) { // drained after an earlier call, unless its node is down
			err = s.expectGone(ctx, previous.queue(i))
		}
		if err != nil {
			return fmt.Errorf("mark the end of %q: %w", previous.queue(i), err)
		}
	}
	s.settings.Logger.InfoContext(ctx, "shards moved", "topic", topic, "previous", previous.count, "shards", next.count)
	return nil
}

// expectGone returns an error if there is such a queue: then it has no marker.
func (s *Subscriber) expectGone(ctx context.Context, queue string) error {
	err := s.declare(ctx, func(channel *amqp.Channel) error {
		_, err := channel.QueueDeclarePassive(queue, durable, autoDelete, exclusive, noWait, nil)
		return err
	})
	switch {
	case err == nil:
		return errNoQueue // it was made just now
	case noQueue(err):
		return nil
	}
	return err
}

// deleteExchange is a step that deletes an exchange with its bindings, if it exists.
func deleteExchange(name string) func(*amqp.Channel) error {
	return func(channel *amqp.Channel) error {
		if err := channel.ExchangeDelete(name, false, noWait); err != nil {
			return fmt.Errorf("delete exchange %q: %w", name, err)
		}
		return nil
	}
}
