package rabbitmq

import (
	"context"
	"slices"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/amqpconn"
	"github.com/oncemill/oncemill/relay"
)

const (
	// sweepEvery is how often a waiting lane checks more than its oldest message: for
	// confirms out of order and for contexts that end out of order.
	sweepEvery = 20 * time.Millisecond
	// idleSweepEvery is the same while every message has its outcome and only
	// confirms are awaited.
	idleSweepEvery = time.Second
	// maxRoutes bounds the remembered topics and exchanges.
	maxRoutes = 4096
)

// batch is the messages of one call of Publish.
type batch struct {
	msgs  []*relay.Message
	term  uint64          // of the messages; the relay may change a message once it has its outcome
	ended <-chan struct{} // of the context
	done  func(*relay.Message, error)
}

func newBatch(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) *batch {
	return &batch{msgs: slices.Clone(msgs), term: msgs[0].Term, ended: ctx.Done(), done: done}
}

func (b *batch) hasEnded() bool {
	select {
	case <-b.ended:
		return true
	default:
		return false
	}
}

// item is a message that waits to be published.
type item struct {
	message *relay.Message
	batch   *batch
}

// route is where the messages of a topic go.
type route struct {
	topic         string
	exchange, key string
	refusal       error // AMQP has no such names
	declared      bool
	confirmed     *mark // of the topic, on the current connection
	confirmedOn   *channel
}

// lane publishes the messages of one lane, in their order, on one channel. Its goroutine
// both publishes and waits for the confirms, and never waits for anything else. Requests
// to the broker are made by the link's goroutine.
type lane struct {
	running *running
	number  int
	wake    chan struct{}
	inbox   *mailbox[*batch]
	replies *mailbox[reply]

	// Everything below belongs to the goroutine of run.

	pending  fifo[item]
	channel  *channel // nil unless open
	retired  []*channel
	late     late
	grace    grace
	asked    *link // the link whose reply is awaited
	routes   map[string]*route
	latest   *route // the last one looked up
	isolated isolation
	batches  []*batch // kept for its memory
	cut      cut
}

// cut is the latest term of a pipeline that an outage has ended, and the outcome of its
// messages. The goroutine that reports this outcome also takes in further messages of the
// term, so no message that is passed to the sink meanwhile gets through.
type cut struct {
	term    uint64
	outcome error
}

// end ends a term. Terms only increase: messages in flight of an older one already have
// their outcome.
func (c *cut) end(term uint64, outcome error) {
	if term > c.term {
		*c = cut{term, outcome}
	}
}

func newLane(r *running, number int) *lane {
	wake := make(chan struct{}, 1)
	l := &lane{
		running:  r,
		number:   number,
		wake:     wake,
		inbox:    newMailbox[*batch](wake),
		replies:  newMailbox[reply](wake),
		routes:   make(map[string]*route),
		isolated: newIsolation(r.settings.Window),
	}
	l.late.repeated = l.takeRepeated
	return l
}

// run serves the lane until ctx ends and then gives back the messages without an outcome.
func (l *lane) run(ctx context.Context) {
	defer l.close()
	timer := time.NewTimer(idleSweepEvery)
	defer timer.Stop()
	armed := idleSweepEvery
	for {
		l.step(ctx)
		if due := l.sweepDue(); due > 0 && (armed == 0 || due < armed) {
			timer.Reset(due)
			armed = due
		}
		confirmed, ended, closes := l.awaited()
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-confirmed:
		case cause := <-closes:
			l.channel.closed, l.channel.cause = true, cause
		case <-ended:
			l.sweep(ctx)
		case <-timer.C:
			armed = 0
			l.sweep(ctx)
		}
	}
}

// step takes in what has arrived and publishes what it can.
func (l *lane) step(ctx context.Context) {
	now := l.running.state.Load()
	if l.asked != now.link {
		l.asked = nil // that connection answers no more
	}
	if len(l.retired) > 0 && l.retired[0].link != now.link {
		l.tendRetired()
	}
	l.receive()
	if c := l.channel; c != nil && (!c.settle(false) || c.isClosed() || c.link != now.link) {
		l.lose(ctx, unavailableNoConnection)
	}
	l.replaceNacking(ctx)
	l.publish(now)
}

func (l *lane) receive() {
	l.batches = l.inbox.take(l.batches)
	for _, b := range l.batches {
		over := b.term != 0 && b.term == l.cut.term
		for _, m := range b.msgs {
			switch e := l.late.on(l.channel, m); {
			case over:
				b.done(m, l.cut.outcome)
			case e != nil:
				l.adopt(e, m, b)
			default:
				l.pending.push(item{m, b})
			}
		}
		b.msgs = nil
	}
	for _, r := range l.replies.take(nil) {
		if r.link != l.asked {
			continue
		}
		l.asked = nil
		switch {
		case r.err != nil && r.route != nil:
			l.failTopic(r.route.topic, r.err)
		case r.err != nil:
			l.failPending(0, r.err)
		case r.route != nil:
			r.route.declared = true
		default:
			r.channel.isolated, r.channel.late = &l.isolated, &l.late
			r.channel.trusted, r.channel.renewal = l.grace.until(), l.grace.renewal(time.Now())
			l.channel = r.channel
		}
	}
}

// publish sends pending messages until something prevents it. The lane is poked when that
// has ended.
func (l *lane) publish(now *state) {
	switch {
	case l.pending.len() == 0:
	case now.err != nil:
		l.failPending(0, now.err)
	case now.link == nil || now.link.blocked.Load() || l.asked != nil:
	case l.channel == nil:
		l.latest = nil // of a connection that was lost before it gave the lane a channel
		clear(l.routes)
		c := call{lane: l, open: true}
		if r := l.route(now.link, l.pending.all()[0].message.Topic); r.refusal == nil {
			c.declare = r
		}
		l.ask(now.link, c)
	default:
		at := time.Now()
		for l.pending.len() > 0 && l.publishNext(at) {
		}
	}
}

// publishNext handles the oldest pending message and reports whether the next one may
// follow.
func (l *lane) publishNext(at time.Time) bool {
	c, it := l.channel, l.pending.all()[0]
	alone := l.isolated.has(it.message)
	switch {
	case it.batch.hasEnded(), !c.leaving.IsZero(): // run waits for this, too, and sweeps
		return false
	case c.full() || c.unresolved > 0 && (alone || c.alone):
		return false
	case !c.broken.IsZero() || c.link.blocked.Load() || !c.link.net.room():
		return false
	}
	r := l.route(c.link, it.message.Topic)
	if r.refusal != nil {
		l.pending.drop(1)
		it.batch.done(it.message, r.refusal)
		return true
	}
	if !r.declared {
		if !c.link.hasDeclared(r.exchange) {
			l.ask(c.link, call{lane: l, declare: r})
			return false
		}
		r.declared = true
	}
	p, err := l.running.settings.encoder.encode(it.message, c.link.conn.Config.FrameSize)
	if err != nil {
		l.pending.drop(1)
		it.batch.done(it.message, relay.Refused(err))
		return true
	}
	if err := c.publish(r, p, it, at); err != nil {
		// The channel is closed. The message stays pending until NotifyClose has reported why,
		// and is then treated like the others.
		c.broken = at
		return false
	}
	l.pending.drop(1)
	c.alone = alone
	return true
}

// adopt takes over a message that was passed to the sink again while a copy of it is in
// flight on the lane's channel. That copy serves: on a slow broker no message is sent
// twice.
func (l *lane) adopt(e *entry, m *relay.Message, b *batch) {
	l.late.remove(e)
	e.message, e.batch, e.term = m, b, b.term
	e.channel.waiting++
}

// takeRepeated finds a message that was passed to the sink again and has no outcome.
func (l *lane) takeRepeated(m *relay.Message) (*relay.Message, func(*relay.Message, error)) {
	if i := slices.IndexFunc(l.pending.all(), func(it item) bool { return it.message.SameRow(m) }); i >= 0 {
		it := l.pending.all()[i]
		l.pending.remove(i)
		return it.message, it.batch.done
	}
	if l.channel == nil {
		return nil, nil
	}
	for _, e := range l.channel.flight.all() {
		if e.batch != nil && e.message.SameRow(m) {
			b := e.batch
			e.batch = nil
			l.channel.waiting--
			return e.message, b.done
		}
	}
	return nil, nil
}

func (l *lane) route(to *link, topic string) *route {
	if l.latest != nil && l.latest.topic == topic {
		return l.latest
	}
	r := l.routes[topic]
	if r == nil {
		if len(l.routes) >= maxRoutes {
			clear(l.routes)
		}
		topology := &l.running.settings.topology
		r = &route{topic: topic, confirmed: to.mark(topic)}
		err := apart(func() error {
			r.exchange = topology.Exchange.GenerateName(topic)
			r.key = topology.Publish.GenerateRoutingKey(topic)
			return nil
		})
		if err != nil {
			r.refusal = relay.Refused(err)
			return r // asked again for the next message
		}
		if problem := amqpconn.CheckShort(r.exchange); problem != "" {
			r.refusal = relay.Refused(&PropertyError{"exchange", problem})
		} else if problem := amqpconn.CheckShort(r.key); problem != "" {
			r.refusal = relay.Refused(&PropertyError{"routing-key", problem})
		}
		l.routes[topic] = r
	}
	l.latest = r
	return r
}

// ask makes a request of the link, one at a time; the reply pokes the lane.
func (l *lane) ask(to *link, c call) {
	l.asked = to
	to.calls.put(c)
}

// awaited returns what the lane waits for in addition to its mailboxes.
func (l *lane) awaited() (confirmed, ended <-chan struct{}, closes <-chan *amqp.Error) {
	if c := l.channel; c != nil {
		closes = c.closes
		if e := c.oldest(); e != nil {
			confirmed = e.confirm.Done()
		}
		if e := c.oldestWaiting(); e != nil {
			return confirmed, e.batch.ended, closes
		}
	}
	if l.pending.len() > 0 {
		ended = l.pending.all()[0].batch.ended
	}
	return confirmed, ended, closes
}

// sweepDue returns when to check everything again, 0 for never.
func (l *lane) sweepDue() time.Duration {
	c := l.channel
	switch {
	case l.pending.len() > 0, c != nil && c.waiting > 0:
		return sweepEvery
	case c != nil && c.unresolved > 0, len(l.retired) > 0:
		return idleSweepEvery
	}
	return 0
}
