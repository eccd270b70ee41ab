package rabbitmq

import (
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/contain"
)

// Publish puts messages at the end of the queue of a topic, the one that Subscribe consumes
// from. Other consumers of the topic have other queues and do not receive them, so a
// subscriber is the right Publisher of inbox.Replays. It returns nil when the broker has
// confirmed all of them, and an error if that takes longer than Config.CallTimeout, or if
// there is no such queue. After an error some of the messages may be in the queue.
//
// It has a connection of its own, since a broker that is short of memory or disk space
// stops reading from connections that publish.
func (s *Subscriber) Publish(topic string, messages ...*message.Message) error {
	sub, err := s.begin(topic)
	if err != nil {
		return err
	}
	defer s.end(sub)
	if err := sub.publish(messages); err != nil {
		return fmt.Errorf("rabbitmq: publish to the queue of %q: %w", topic, err)
	}
	return nil
}

func (s *subscription) publish(messages []*message.Message) error {
	publishings := make([]amqp.Publishing, len(messages))
	for i, msg := range messages {
		err := contain.Call(func() (err error) {
			publishings[i], err = s.owner.settings.topology.Marshaler.Marshal(msg)
			return err
		})
		if err != nil {
			return fmt.Errorf("marshal message %q: %w", msg.UUID, err)
		}
	}
	l, err := s.owner.publishing.get(untilClosed{s.owner.closing})
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return l.within(func() error {
		channel, err := l.conn.Channel()
		if err != nil {
			return fmt.Errorf("open a channel: %w", err)
		}
		return errors.Join(put(channel, s.queue, publishings), channel.Close())
	})
}

// put publishes to a queue and waits for the confirms. The broker returns a message that
// it has no queue for before it confirms it.
func put(channel *amqp.Channel, queue string, publishings []amqp.Publishing) error {
	returned := channel.NotifyReturn(make(chan amqp.Return, len(publishings)))
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	if err := channel.Confirm(false); err != nil {
		return fmt.Errorf("ask for confirms: %w", err)
	}
	confirms := make([]*amqp.DeferredConfirmation, len(publishings))
	for i, p := range publishings {
		confirm, err := channel.PublishWithDeferredConfirm("", queue, true, false, p)
		if err != nil {
			return err
		}
		confirms[i] = confirm
	}
	for _, confirm := range confirms {
		if confirm.Wait() {
			continue
		}
		select {
		case reason := <-closed: // before the confirms that do not come any more
			return fmt.Errorf("%w: %w", errNotConfirmed, cause(reason))
		default:
			return errNotConfirmed
		}
	}
	select {
	case <-returned:
		return fmt.Errorf("%w: %q", errNoQueue, queue)
	default:
		return nil
	}
}
