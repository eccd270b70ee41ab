package rabbitmq

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/text"
)

// delivery is a delivery on its way through a subscription. Only the goroutine of the
// subscription uses it.
type delivery struct {
	session *session // whose channel it came by; nil once that is lost
	by      *added   // the consumer; nil for that which is always there
	raw     amqp.Delivery
	arrived time.Time
	out     time.Time // handed out
	lane    *lane     // nil if nothing waits for it
	slot    bool      // it holds one of the slots that shards share
	nacks   int
	queue   bool      // it has left its lane, and joins it again at its end when it is due
	due     time.Time // while it is delayed

	msg    *message.Message // ready to be handed out, or handed out
	cancel context.CancelFunc
	note   *note
	id     string // of the message, as it came
	key    string
	reason error // why the marshaler or Config.Key cannot read it
}

// lane contains the deliveries of one ordering key, or of one id. At most one of them is
// handed out; the others wait.
type lane struct {
	name    string
	head    *delivery // the one that is ready, handed out or delayed; nil while it is awaited
	waiting []*delivery

	// Deliveries that were given back come again, but others may arrive before them, and a
	// quorum queue reorders more than 32. awaited begins at the first that has not come.
	awaited []position
	until   time.Time
}

// position is the place of a delivery that was given back, or arrived behind one.
type position struct {
	id       string
	delivery *delivery // nil until it comes again
	behind   bool      // arrived behind one, and was given back too
}

// enqueue puts p behind all others, or where it was before it was given back. It reports
// whether p was awaited, so that the others are worth waiting for.
func (l *lane) enqueue(p *delivery) bool {
	if len(l.awaited) == 0 {
		l.waiting = append(l.waiting, p)
		return false
	}
	i := -1
	if p.raw.Redelivered {
		i = slices.IndexFunc(l.awaited, func(at position) bool { return at.delivery == nil && at.id == p.id })
	}
	if i < 0 {
		l.awaited = append(l.awaited, position{id: p.id, delivery: p})
		return false
	}
	l.awaited[i].delivery = p
	progress := i == 0 || !l.awaited[i].behind // or a busy key would wait for ever for one that never comes
	for len(l.awaited) > 0 && l.awaited[0].delivery != nil {
		l.waiting = append(l.waiting, l.awaited[0].delivery)
		l.awaited = l.awaited[1:]
	}
	return progress
}

// giveBackLast gives back what has just arrived behind awaited ones, so that it comes again after
// them.
func (l *lane) giveBackLast() {
	last := &l.awaited[len(l.awaited)-1]
	last.delivery.returned()
	last.delivery, last.behind = nil, true
}

// awaitNone stops waiting for the deliveries that do not come again, and releases those
// behind them.
func (l *lane) awaitNone() {
	l.waiting, l.awaited = slices.AppendSeq(l.waiting, l.arrived()), nil
}

// arrived returns the deliveries that have arrived among the awaited, and behind them.
func (l *lane) arrived() iter.Seq[*delivery] {
	return func(yield func(*delivery) bool) {
		for _, at := range l.awaited {
			if at.delivery != nil && !yield(at.delivery) {
				return
			}
		}
	}
}

// behind returns how many deliveries wait behind the head.
func (l *lane) behind() (n int) {
	n = len(l.waiting)
	for range l.arrived() {
		n++
	}
	return n
}

// unmarshal reads the delivery and its key. The marshaler and Config.Key may end the goroutine,
// which loses the session: from then on each call has one.
func (s *Subscriber) unmarshal(delivery amqp.Delivery) (msg *message.Message, key string, err error) {
	if !s.exits.Load() {
		return s.settings.unmarshal(delivery)
	}
	err = <-nopanic.Apart(func() (err error) {
		msg, key, err = s.settings.unmarshal(delivery)
		return err
	})
	return msg, key, err
}

// unmarshal reads the delivery and its key. The body is a copy, so that a handler that
// changes it does not change a later try.
func (s *settings) unmarshal(delivery amqp.Delivery) (msg *message.Message, key string, err error) {
	delivery.Body = bytes.Clone(delivery.Body)
	err = nopanic.Call(func() (err error) {
		if problem, unreadable := delivery.Headers[amqpconn.UnreadableHeader]; unreadable {
			return fmt.Errorf("%w: %v", errUnreadable, problem)
		}
		if msg, err = s.topology.Marshaler.Unmarshal(delivery); err != nil {
			return err
		}
		if msg == nil {
			return errNoMessage
		}
		key = s.Key(msg)
		return nil
	})
	return msg, key, err
}

// prepare makes the message to hand out, with a context of its own that has the values of
// ctx. leaving is closed when no more is consumed.
func (p *delivery) prepare(ctx context.Context, s *Subscriber, topic string, leaving <-chan struct{}) {
	if p.msg == nil {
		p.read(s)
	}
	p.note = &note{topic: topic, leaving: leaving, nacks: p.nacks, arrivedAt: p.arrived, redelivered: p.raw.Redelivered}
	if _, relayed := p.raw.Headers[relayHeader]; relayed {
		p.note.createdAt = p.raw.Timestamp
	}
	var base context.Context
	base, p.cancel = context.WithDeadline(ctx, p.arrived.Add(s.settings.AckTimeout))
	p.msg.SetContext(inbox.ContextWithDelivery(base, p.note))
}

// read makes the message, with the tolerant marshaler if needed.
func (p *delivery) read(s *Subscriber) {
	p.msg, p.key, p.reason = s.unmarshal(p.raw)
	if p.reason == nil {
		p.id = p.msg.UUID
	} else {
		raw := p.raw
		raw.Body = bytes.Clone(raw.Body)
		p.msg, _ = s.settings.tolerant.Unmarshal(raw)     // it never fails
		delete(p.msg.Metadata, amqpconn.UnreadableHeader) // p.reason has it, and a replay must be readable
	}
}

// logMalformed logs that a delivery that cannot be read stays in its queue. Anybody may send any
// number of them.
func (s *subscription) logMalformed(p *delivery, err error) {
	level, attrs := s.malformed.Event(slog.LevelError, err.Error())
	s.owner.settings.Logger.Log(p.msg.Context(), level, "malformed delivery stays in its queue",
		append(attrs, "queue", s.queue, "message_id", text.Shorten(p.msg.UUID), "reason", p.reason, "error", err)...)
}

// laneName returns the name of the delivery's lane: the key of the message, or its id, so
// that copies of it share a lane.
func (p *delivery) laneName() string {
	switch {
	case p.reason != nil:
		return ""
	case p.key != "":
		return "key " + p.key
	case p.id != "":
		return "id " + p.id
	}
	return ""
}

// relayHeader is set by a relay, whose timestamp is that of the producer's database. The
// timestamps of other producers may mean anything.
const relayHeader = "oncemill_id"

// note is what a handler can learn about its delivery, and request for it.
type note struct {
	topic       string
	leaving     <-chan struct{}
	nacks       int
	arrivedAt   time.Time
	redelivered bool
	createdAt   time.Time
	delay       atomic.Int64 // nanoseconds; 0: NackDelay
	yields      atomic.Bool
}

// Topic returns the topic that the message was subscribed to, for a message that has not
// come through a router.
func (n *note) Topic() string { return n.topic }

// Leaving returns a channel that is closed when the subscriber takes no more deliveries from
// where this one comes from.
func (n *note) Leaving() <-chan struct{} { return n.leaving }

func (n *note) Nacks() int { return n.nacks }

func (n *note) Redelivered() bool { return n.redelivered }

func (n *note) ArrivedAt() time.Time { return n.arrivedAt }

func (n *note) CreatedAt() time.Time { return n.createdAt }

func (n *note) Yield() { n.yields.Store(true) }

func (n *note) DelayNack(d time.Duration) { n.delay.Store(int64(max(d, 1))) }

// nackDelay returns the time until the redelivery of a message that was nacked.
func (p *delivery) nackDelay(s *settings) time.Duration {
	if asked := time.Duration(p.note.delay.Load()); asked > 0 {
		return asked
	}
	delay := s.NackDelay
	for range p.nacks - 1 {
		if delay *= 2; delay >= s.NackDelayMax {
			return s.NackDelayMax
		}
	}
	return delay
}

// next releases the delivery behind p in its lane.
func (s *subscription) next(p *delivery) {
	if p.lane != nil {
		s.advance(p.lane)
	}
}

// advance makes the first that waits in l its head.
func (s *subscription) advance(l *lane) {
	l.head = nil
	switch {
	case len(l.waiting) > 0:
		l.head = l.waiting[0]
		s.ready = append(s.ready, l.head)
		l.waiting[0] = nil
		l.waiting = l.waiting[1:]
	case len(l.awaited) == 0:
		delete(s.lanes, l.name)
	}
}
