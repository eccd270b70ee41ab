package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// session is one AMQP channel, with a consumer on it.
type session struct {
	link       *link
	channel    *amqp.Channel
	deliveries <-chan amqp.Delivery
	lost       <-chan *amqp.Error
	acks       acks

	next  uint64                   // tag of the delivery to be taken in
	early map[uint64]amqp.Delivery // those that came before it

	more       []*added           // consumers that were added
	made       int                // how many were ever added
	calm       int                // checks in a row that found more of them than needed
	others     chan amqp.Delivery // their deliveries
	forwarders sync.WaitGroup
	ended      chan struct{} // closed with the session
}

// open declares what the subscription needs, as the topology builder defines it, and
// begins to consume.
func (s *subscription) open(ctx context.Context) (*session, error) {
	l, err := s.owner.connector.get(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	settings := s.owner.settings
	consume := settings.topology.Consume
	opened := &session{link: l, next: 1, early: make(map[uint64]amqp.Delivery), others: make(chan amqp.Delivery), ended: make(chan struct{})}
	err = l.within(func() error {
		channel, err := l.conn.Channel()
		if err != nil {
			return fmt.Errorf("open a channel: %w", err)
		}
		opened.channel = channel
		opened.lost = channel.NotifyClose(make(chan *amqp.Error, 1))
		opened.acks.prefetch = consume.Qos.PrefetchCount
		if err := s.declare(channel); err != nil {
			return err
		}
		if err := channel.Qos(consume.Qos.PrefetchCount, 0, false); err != nil {
			return fmt.Errorf("set the prefetch: %w", err)
		}
		const autoAck, noWait = false, false
		opened.deliveries, err = channel.Consume(s.queue, consume.Consumer, autoAck, consume.Exclusive, consume.NoLocal, noWait, consume.Arguments)
		if err != nil {
			return fmt.Errorf("consume: %w", err)
		}
		return nil
	})
	if err != nil {
		err = withReason(err, opened.lost)
		opened.close()
		if s.shard != nil && noQueue(err) {
			err = fmt.Errorf("%w: %w", errShardGone, err)
		}
		return nil, err
	}
	return opened, nil
}

func (s *subscription) declare(channel *amqp.Channel) error {
	if s.shard != nil {
		// All shards are declared together: see Subscriber.declareAndBind.
		_, err := channel.QueueDeclarePassive(s.queue, true, false, false, false, nil)
		if err != nil {
			return fmt.Errorf("look for queue %q: %w", s.queue, err)
		}
		return nil
	}
	topology := s.owner.settings.topology
	err := nopanic.Call(func() error {
		return topology.TopologyBuilder.BuildTopology(channel, s.queue, s.exchange, topology, watermill.NopLogger{})
	})
	if err != nil {
		return fmt.Errorf("declare queue %q: %w", s.queue, err)
	}
	return nil
}

// close closes the channel; the broker requeues what has not been acknowledged. The broker
// answers the close only after it has seen all acknowledgements.
func (o *session) close() {
	if o.channel == nil {
		return
	}
	close(o.ended)
	// If it fails, the channel is closed too.
	_ = o.link.within(o.channel.Close)
	o.forwarders.Wait()
}

// cause returns why the session has ended when its channel has closed.
func cause(err *amqp.Error) error {
	if err == nil {
		return errClosedQuietly
	}
	return err
}

// withReason adds to an error why the channel has closed, which amqp091-go does not always
// return.
func withReason(err error, closed <-chan *amqp.Error) error {
	if !errors.Is(err, amqp.ErrClosed) {
		return err
	}
	select {
	case reason := <-closed:
		return fmt.Errorf("%w: %w", cause(reason), err)
	default:
		return err
	}
}

// flush sends recorded acknowledgements; see [acks.flush]. If it cannot, the channel is
// lost, and NotifyClose reports why.
func (o *session) flush(ctx context.Context, log *slog.Logger, h haste) {
	if o.channel == nil {
		return
	}
	err := o.acks.flush(h, func(tag uint64, multiple bool) error { return o.channel.Ack(tag, multiple) })
	if err != nil {
		log.DebugContext(ctx, "acknowledgement not sent", "error", err)
	}
}

// acks records which deliveries of a channel are to be acknowledged, so that one frame
// acknowledges a run of consecutive ones. A frame costs the broker, especially with a
// quorum queue, more than delivering a message. Tags count up from 1, one for each delivery.
type acks struct {
	prefetch int    // how many the broker allows to be open
	first    uint64 // tag of states[0]
	states   []ackState
	newest   uint64   // highest tag that is acked or settled
	unsent   []unsent // in order of their acks
	rounds   int      // overdue flushes until now
	open     int      // deliveries that the broker counts: neither sent nor rejected
	refused  int      // deliveries that were rejected

	// Deliveries that have been unsettled for long, for example delayed ones, or ones that
	// wait for an earlier message of their key.
	old      int
	oldBelow uint64 // their tags are below
	ageing   int    // unsettled ones below seen, which are old at the next count
	seen     uint64
	ticks    int // overdue flushes until then
}

type ackState byte

const (
	ackUnsettled ackState = iota
	ackPending            // to be sent
	ackSettled            // sent, or rejected
)

// unsent is an acknowledgement that is to be sent.
type unsent struct {
	tag   uint64
	round int // overdue flushes before it
}

// arrived records the next delivery.
func (a *acks) arrived(tag uint64) {
	if len(a.states) == 0 {
		a.first = tag
	}
	for a.first+uint64(len(a.states)) <= tag {
		a.states = append(a.states, ackUnsettled)
		a.open++
	}
}

func (a *acks) ack(tag uint64) {
	a.settled(tag, ackPending)
	a.unsent = append(a.unsent, unsent{tag, a.rounds})
}

// rejected records that the broker was sent something other than an acknowledgement.
func (a *acks) rejected(tag uint64) {
	a.settled(tag, ackSettled)
	a.open--
	a.refused++
}

func (a *acks) settled(tag uint64, state ackState) {
	a.states[tag-a.first] = state
	a.newest = max(a.newest, tag)
	if tag < a.oldBelow {
		a.old--
	}
	if tag < a.seen {
		a.ageing--
	}
}

// age marks as old the deliveries that were already here, unsettled, at the last count.
func (a *acks) age() {
	if a.ticks--; a.ticks > 0 {
		return
	}
	a.ticks, a.oldBelow, a.old = ticksToAge, a.seen, a.ageing
	a.seen, a.ageing = a.first+uint64(len(a.states)), a.open-len(a.unsent)
}

const (
	// ticksToAge spans many lingers: in a full window of short handlers nothing gets old.
	ticksToAge = 16

	// maxRounds is how many overdue flushes leave out an acknowledgement that is behind an
	// unsettled delivery. The next one sends it.
	maxRounds = 3

	// fewOpen is a number of deliveries for which the cost of frames does not matter.
	fewOpen = 64

	// plenty is a number of unsettled deliveries that keeps handlers busy until the broker
	// has sent more, for example those of a few groups of an inbox.
	plenty = 256
)

// ripe reports whether acknowledgements must not wait for others: few others would come,
// or they are half of what the prefetch lets the broker send. Deliveries that have been
// unsettled for long do not count, since they may stay so.
func (a *acks) ripe() bool {
	return len(a.unsent) > 0 && (a.open-a.old < fewOpen || 2*len(a.unsent) >= a.prefetch-a.old)
}

// excess returns how many acknowledgements, the longest waiting first, must not wait for a
// run: all ripe ones, unless a run will soon contain most of them. In that case it only
// makes sure that handlers keep plenty of deliveries.
func (a *acks) excess() int {
	switch n := len(a.unsent); {
	case !a.ripe():
		return 0
	case a.open < fewOpen, a.prefetch < 2*plenty, !a.runSoon():
		return n
	default:
		return max(0, n-(a.prefetch-plenty))
	}
}

// runSoon reports whether a run will soon contain most of the waiting acknowledgements:
// nothing is old, and the run has few holes. It has many if deliveries are settled in any
// order. Handlers that take the oldest first leave few: the deliveries they are handling,
// and those that wait behind them.
func (a *acks) runSoon() bool {
	after := len(a.states) - int(a.newest+1-a.first) // all of them unsettled
	holes := a.open - len(a.unsent) - after
	return a.old == 0 && 3*holes <= 2*len(a.unsent)
}

// haste selects which acknowledgements no longer wait for earlier ones.
type haste int

const (
	flushRipe    haste = iota // the excess
	flushOverdue              // that, and those left out maxRounds times
	flushAll                  // all
)

// flush sends one acknowledgement for everything up to the first unsettled delivery.
// Acknowledgements behind it need a frame each, so they wait for it as long as h permits.
func (a *acks) flush(h haste, send func(tag uint64, multiple bool) error) error {
	if tag := a.takeRun(); tag != 0 {
		if err := send(tag, true); err != nil {
			return err
		}
	}
	n := a.excess() // acknowledgements that wait no longer
	switch h {
	case flushAll:
		n = len(a.unsent)
	case flushOverdue:
		for n < len(a.unsent) && a.rounds-a.unsent[n].round >= maxRounds {
			n++
		}
		a.rounds++
		a.age()
	}
	for _, u := range a.unsent[:n] {
		if err := send(u.tag, false); err != nil {
			return err
		}
		a.states[u.tag-a.first] = ackSettled
		a.open--
	}
	a.unsent = slices.Delete(a.unsent, 0, n)
	return nil
}

// takeRun removes the settled deliveries before the first unsettled one. It returns the last
// tag among them that must be sent; 0 for none.
func (a *acks) takeRun() (last uint64) {
	n := 0
	for n < len(a.states) && a.states[n] != ackUnsettled {
		if a.states[n] == ackPending {
			last = a.first + uint64(n)
			a.open--
		}
		n++
	}
	if n == 0 {
		return 0
	}
	a.first += uint64(n)
	a.states = a.states[:copy(a.states, a.states[n:])]
	a.unsent = slices.DeleteFunc(a.unsent, func(u unsent) bool { return u.tag < a.first })
	return last
}
