package rabbitmq

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"
	amqp "github.com/rabbitmq/amqp091-go"
)

// session is one AMQP channel with one consumer on it.
type session struct {
	link       *link
	channel    *amqp.Channel
	deliveries <-chan amqp.Delivery
	lost       <-chan *amqp.Error
	acks       acks
}

// open declares what the subscription needs, as the topology builder says, and
// begins to consume.
func (s *subscription) open(ctx context.Context) (*session, error) {
	l, err := s.owner.connector.get(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	settings := s.owner.settings
	consume := settings.topology.Consume
	opened := &session{link: l}
	err = l.within(func() error {
		channel, err := l.conn.Channel()
		if err != nil {
			return fmt.Errorf("open a channel: %w", err)
		}
		opened.channel = channel
		if err := s.declare(channel); err != nil {
			return err
		}
		if err := channel.Qos(consume.Qos.PrefetchCount, 0, false); err != nil {
			return fmt.Errorf("set the prefetch: %w", err)
		}
		opened.lost = channel.NotifyClose(make(chan *amqp.Error, 1))
		const autoAck, noWait = false, false
		opened.deliveries, err = channel.Consume(s.queue, consume.Consumer, autoAck, consume.Exclusive, consume.NoLocal, noWait, consume.Arguments)
		if err != nil {
			return fmt.Errorf("consume: %w", err)
		}
		return nil
	})
	if err != nil {
		opened.close()
		return nil, err
	}
	return opened, nil
}

func (s *subscription) declare(channel *amqp.Channel) error {
	topology := s.owner.settings.topology
	err := topology.TopologyBuilder.BuildTopology(channel, s.queue, s.exchange, topology, watermill.NopLogger{})
	if err != nil {
		return fmt.Errorf("declare queue %q: %w", s.queue, err)
	}
	return nil
}

// close ends the channel; the broker takes back what has not been acknowledged.
// The broker's answer to it comes after it has seen all acknowledgements.
func (o *session) close() {
	if o.channel == nil {
		return
	}
	// If it fails the channel is closed too.
	_ = o.link.within(o.channel.Close)
}

// cause returns why the session has ended when its channel has closed.
func cause(err *amqp.Error) error {
	if err == nil {
		return errClosedQuietly
	}
	return err
}

// flush sends the acknowledgements that were noted. If it cannot, the channel is
// lost, and NotifyClose says why.
func (o *session) flush(ctx context.Context, log *slog.Logger) {
	err := o.acks.flush(func(tag uint64, multiple bool) error { return o.channel.Ack(tag, multiple) })
	if err != nil {
		log.DebugContext(ctx, "acknowledgement not sent", "error", err)
	}
}

// acks remembers which deliveries of a channel are to be acknowledged, so that
// one frame does for a row of them. Tags count up from 1, one for each delivery.
type acks struct {
	first  uint64 // tag of states[0]
	states []ackState
	fresh  []uint64 // acked since the last flush
}

type ackState byte

const (
	unsettled ackState = iota
	acked              // to be sent
	settled            // sent, or rejected
)

// arrived notes the next delivery.
func (a *acks) arrived(tag uint64) {
	if len(a.states) == 0 {
		a.first = tag
	}
	for a.first+uint64(len(a.states)) <= tag {
		a.states = append(a.states, unsettled)
	}
}

func (a *acks) ack(tag uint64) {
	a.states[tag-a.first] = acked
	a.fresh = append(a.fresh, tag)
}

// rejected notes that the broker has been told something else.
func (a *acks) rejected(tag uint64) { a.states[tag-a.first] = settled }

// flush sends one acknowledgement for all up to the first unsettled delivery, and
// one for each behind it.
func (a *acks) flush(send func(tag uint64, multiple bool) error) error {
	if len(a.fresh) == 0 {
		return nil
	}
	n, last := 0, uint64(0) // what can be forgotten; the last tag in it that is to be sent
	for n < len(a.states) && a.states[n] != unsettled {
		if a.states[n] == acked {
			last = a.first + uint64(n)
		}
		n++
	}
	var err error
	if last != 0 {
		err = send(last, true)
	}
	for _, tag := range a.fresh {
		if err != nil {
			break
		}
		if tag > last && tag >= a.first+uint64(n) {
			err = send(tag, false)
			a.states[tag-a.first] = settled
		}
	}
	a.fresh = a.fresh[:0]
	a.first += uint64(n)
	a.states = a.states[:copy(a.states, a.states[n:])]
	return err
}
