package rabbitmq

import (
	"fmt"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/internal/nopanic"
)

// Publish puts messages at the end of the queue of a topic, the one that Subscribe consumes
// from, or of the right shards. Other consumers of the topic have other queues and do not
// receive them, so a subscriber is the right Publisher of inbox.Replays. It returns nil when the broker has
// confirmed all of them. It returns an error if that takes longer than Config.CallTimeout,
// not counting the time to connect, if there is no such queue, if a message has more
// headers than fit into a frame, or when the subscriber is closed meanwhile. After an error
// some of the messages may be in the queue. Headers named CC and BCC, by which RabbitMQ
// sends copies elsewhere, are left out.
//
// It has a connection of its own, since a broker that is short of memory or disk space
// stops reading from connections that publish.
func (s *Subscriber) Publish(topic string, messages ...*message.Message) error {
	sub, err := s.begin(topic)
	if err != nil {
		return err
	}
	defer s.end(sub)
	to := address{key: s.queueOf(sub)}
	if s.settings.Shards.Count > 0 {
		l, err := s.settings.layout(topic)
		if err != nil {
			return fmt.Errorf("rabbitmq: publish to the shards of %q: %w", topic, err)
		}
		to = address{exchange: l.entry()}
	}
	if err := s.publish(to, messages); err != nil {
		return fmt.Errorf("rabbitmq: publish to the queue of %q: %w", topic, err)
	}
	return nil
}

// queueOf returns the queue that is consumed from, since its name may be made anew each
// time, or that of another subscription to the topic.
func (s *Subscriber) queueOf(other *subscription) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for sub := range s.current {
		if sub.topic == other.topic {
			return sub.queue
		}
	}
	return other.queue
}

// address is where a message is published.
type address struct{ exchange, key string }

func (s *Subscriber) publish(to address, messages []*message.Message) error {
	return s.onChannel(untilClosed{s.closing}, s.publishing, func(l *link, channel *amqp.Channel) (err error) {
		publishings := make([]amqp.Publishing, len(messages))
		for i, msg := range messages {
			if publishings[i], err = s.encode(msg, l.conn.Config.FrameSize); err != nil {
				return fmt.Errorf("message %q: %w", msg.UUID, err)
			}
		}
		return s.put(channel, to, publishings)
	})
}

// encode refuses what would make the client or the broker close the connection.
func (s *Subscriber) encode(msg *message.Message, frameSize int) (p amqp.Publishing, err error) {
	err = nopanic.Call(func() (err error) {
		p, err = s.settings.topology.Marshaler.Marshal(msg)
		return err
	})
	if err != nil {
		return p, fmt.Errorf("marshal: %w", err)
	}
	p.Headers = maps.Clone(p.Headers)
	delete(p.Headers, "CC")
	delete(p.Headers, "BCC")
	if err := amqpconn.CheckTable(p.Headers); err != nil {
		return p, fmt.Errorf("headers: %w", err)
	}
	const others = 2048 // bytes at most for all other properties
	if size, _ := amqpconn.TableSize(p.Headers); frameSize > 0 && size > frameSize-others {
		return p, fmt.Errorf("headers take %d bytes, more than the connection's frame of %d", size, frameSize)
	}
	return p, nil
}

// put publishes and waits for the confirms. The broker returns a message that it has no queue
// for before it confirms it.
func (s *Subscriber) put(channel *amqp.Channel, to address, publishings []amqp.Publishing) error {
	returned := channel.NotifyReturn(make(chan amqp.Return, len(publishings)))
	closed := channel.NotifyClose(make(chan *amqp.Error, 1))
	if err := channel.Confirm(false); err != nil {
		return fmt.Errorf("ask for confirms: %w", err)
	}
	confirms := make([]*amqp.DeferredConfirmation, len(publishings))
	for i, p := range publishings {
		confirm, err := channel.PublishWithDeferredConfirm(to.exchange, to.key, true, false, p)
		if err != nil {
			return err
		}
		confirms[i] = confirm
	}
	for _, confirm := range confirms {
		select {
		case <-confirm.Done():
		case <-s.closing:
			return ErrClosed
		}
		if confirm.Acked() {
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
		return fmt.Errorf("%w: %q", errNoQueue, to.exchange+to.key)
	default:
		return nil
	}
}
