package rabbitmq

import (
	"errors"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/relay"
)

// channel is one AMQP channel in confirm mode and what is in flight on it. Except for its
// construction, everything happens in the goroutine of its lane.
//
// Invariant: unresolved <= cap(returns). amqp091-go drops a return that finds its Go
// channel full for 5 s, and the confirm that follows would then count as a delivery. A
// message is returned at most once and before its confirm, and returns are drained before
// a confirm is trusted. So there are never more returns in the Go channel than messages
// unresolved.
type channel struct {
	link    *link
	amqp    *amqp.Channel
	returns chan amqp.Return
	closes  chan *amqp.Error

	isolated   *isolation // of the lane
	late       *late      // of the lane
	flight     fifo[*entry]
	unresolved int  // entries whose confirm is awaited, with an outcome or without
	waiting    int  // entries without an outcome
	alone      bool // the message in flight is isolated: publish nothing beside it

	broken time.Time   // when a publish failed; NotifyClose reports why
	closed bool        // NotifyClose has reported it
	cause  *amqp.Error // why, nil if it closed without a reason
	stray  bool        // a return matched nothing: confirms cannot be trusted

	retired time.Time // since when only confirms are awaited on it

	opened  int64     // position in the stream of bytes when it opened
	trusted time.Time // until then its nacks are trusted
	useless bool      // it only nacks a topic, while others of the topic are confirmed
	renewal time.Time // when it is too old for a topic that it has only nacked
	tooOld  bool
	leaving time.Time // since when it is about to be replaced: it publishes nothing more
}

// entry is one copy of a message in flight.
type entry struct {
	channel *channel
	confirm confirmation // nil once resolved
	message *relay.Message
	route   *route
	batch   *batch // nil once the message has its outcome
	term    uint64 // of the batch

	// late reports a confirm after an unavailable outcome; nil otherwise.
	late func(*relay.Message, error)

	begin, end int64     // bounds of its position in the stream of bytes
	since      time.Time // of its publishing
	flushed    time.Time // seen to be written out, zero if not yet
	overtaken  time.Time // a later message of the topic was seen to be confirmed, zero if not yet

	answered bool  // the confirm was resolved before returns were last drained
	refusal  error // it has been returned
}

// confirmation is amqp091-go's state of a confirm.
type confirmation interface {
	Done() <-chan struct{}
	Acked() bool
}

var _ confirmation = (*amqp.DeferredConfirmation)(nil)

func newChannel(l *link, ch *amqp.Channel, window int) *channel {
	return &channel{
		link:    l,
		amqp:    ch,
		returns: ch.NotifyReturn(make(chan amqp.Return, window)),
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		opened:  l.net.accepted.Load(),
	}
}

// full reports whether one more message would break the invariant.
func (c *channel) full() bool { return c.unresolved >= cap(c.returns) }

func (c *channel) publish(r *route, p amqp.Publishing, it item, now time.Time) error {
	if c.unresolved >= cap(c.returns) {
		panic("rabbitmq: more messages in flight than returns could be kept")
	}
	const mandatory, immediate = true, false
	begin := c.link.net.accepted.Load()
	confirm, err := c.amqp.PublishWithDeferredConfirm(r.exchange, r.key, mandatory, immediate, p)
	if err != nil {
		return err
	}
	c.flight.push(&entry{
		channel: c, confirm: confirm, message: it.message, route: r, batch: it.batch, term: it.batch.term,
		begin: begin, end: c.link.net.accepted.Load(), since: now,
	})
	c.unresolved++
	c.waiting++
	return nil
}

// settle gives the messages that the broker has confirmed or nacked their outcomes: from
// the oldest up to the first unanswered one, or with all also those behind it. It returns
// false if the channel is closed or must not be trusted.
func (c *channel) settle(all bool) bool {
	entries := c.flight.all()
	n := 0 // entries to look at again
	for i, e := range entries {
		if e.confirm == nil {
			continue
		}
		if resolved(e.confirm) {
			e.answered, n = true, i+1
		} else if !all {
			break
		}
	}
	if n == 0 {
		return true
	}
	// A return is there before the confirm of its message. So for every entry marked above
	// it is there now; for an entry answered since then, perhaps not.
	if !c.drainReturns() {
		return false
	}
	for _, e := range entries[:n] {
		if !e.answered {
			continue
		}
		acked := e.confirm.Acked()
		if !acked && e.refusal == nil && c.isClosed() {
			return false // no nack: closing resolves all that is in flight
		}
		if acked && e.refusal == nil {
			e.route.confirmed.reach(e.begin)
		}
		c.link.answered.reach(e.begin) // a refusal is an answer too
		c.resolve(e, acked)
	}
	c.link.answeredAt.Store(time.Now().UnixNano())
	c.trim()
	return true
}

func resolved(confirm confirmation) bool {
	select {
	case <-confirm.Done():
		return true
	default:
		return false
	}
}

// resolve ends the wait for the confirm of e.
func (c *channel) resolve(e *entry, acked bool) {
	outcome := e.refusal
	switch {
	case outcome == nil && !acked && c.onlyNacks(e):
		outcome, c.useless = interruptedNacked, true
	case outcome == nil && !acked:
		outcome = unavailableNacked
		c.tooOld = c.tooOld || e.route.confirmedOn != c && time.Now().After(c.renewal)
	default:
		if outcome == nil && c.retired.IsZero() {
			e.route.confirmedOn = c
		}
		if c.alone {
			c.isolated.clear(e.message) // the broker took it, routable or not
		}
	}
	if e.late != nil && outcome == nil {
		c.late.confirm(e)
	}
	c.conclude(e, outcome)
	c.forget(e)
}

// onlyNacks reports whether a nack of e is caused by the channel: nothing of the topic was
// ever confirmed on it, while messages that others sent to the topic meanwhile were. In
// RabbitMQ, each channel has a client of each queue. That of a quorum queue whose leader is
// dead when it first publishes nacks until that node is back, also when another node leads the
// queue meanwhile. If all channels do so, none is confirmed: see renewal.
func (c *channel) onlyNacks(e *entry) bool {
	return e.route.confirmedOn != c && e.route.confirmed.Load() > c.opened && time.Now().After(c.trusted)
}

// conclude gives a message its outcome unless it has one.
func (c *channel) conclude(e *entry, outcome error) {
	if e.batch == nil {
		return
	}
	if !errors.Is(outcome, relay.ErrUnavailable) {
		c.late.settle(e.message)
	}
	done := e.batch.done
	e.batch = nil
	c.waiting--
	done(e.message, outcome)
}

// giveBack makes a message unavailable unless it has its outcome. Its confirm is still
// awaited.
func (c *channel) giveBack(e *entry, outcome error) {
	if e.batch == nil {
		return
	}
	e.late = e.batch.done
	c.late.add(e)
	c.conclude(e, outcome)
}

// forget ends the wait for the confirm of e, which has its outcome.
func (c *channel) forget(e *entry) {
	if e.late != nil {
		c.late.remove(e)
	}
	*e = entry{}
	c.unresolved--
}

// drainReturns marks returned messages. It marks all copies of a message in flight: it
// cannot tell which of them was returned, and the confirm of the wrong one must not be
// trusted. It returns false if the channel must not be trusted.
func (c *channel) drainReturns() bool {
	for {
		select {
		case r, open := <-c.returns:
			if !open {
				return !c.stray
			}
			if !c.markReturned(&r) {
				c.stray = true
			}
		default:
			return !c.stray
		}
	}
}

func (c *channel) markReturned(r *amqp.Return) bool {
	lane, id, ok := parseRowID(r.Headers[idHeader])
	if !ok {
		return false
	}
	var refusal error
	for _, e := range c.flight.all() {
		if e.confirm == nil || e.message.ID != id || e.message.Lane != lane {
			continue
		}
		if refusal == nil {
			refusal = relay.Unroutable(&ReturnedError{
				Exchange:   r.Exchange,
				RoutingKey: r.RoutingKey,
				Code:       int(r.ReplyCode),
				Reason:     r.ReplyText,
			})
		}
		e.refusal = refusal
	}
	return refusal != nil
}

// expire makes messages unavailable whose time has ended. They stay in flight, since their
// confirms and returns are still to come.
func (c *channel) expire(outcome error) {
	for _, e := range c.flight.all() {
		if e.batch != nil && e.batch.hasEnded() {
			c.giveBack(e, outcome)
		}
	}
}

// giveUp ends the wait for everything in flight on a channel that is given up. It returns
// the entries that the broker has not answered. Those without an outcome must still be
// given one.
func (c *channel) giveUp() []*entry {
	entries := c.flight.all()
	for _, e := range entries {
		e.answered = e.confirm != nil && resolved(e.confirm)
	}
	trusted := c.drainReturns()
	var unknown []*entry
	for _, e := range entries {
		switch {
		case e.confirm == nil:
		case trusted && (e.refusal != nil || e.answered && e.confirm.Acked()):
			c.resolve(e, true)
		default:
			if e.late != nil {
				c.late.remove(e)
			}
			unknown = append(unknown, e)
		}
	}
	return unknown
}

// oldest returns the oldest unresolved entry, or nil.
func (c *channel) oldest() *entry {
	for _, e := range c.flight.all() {
		if e.confirm != nil {
			return e
		}
	}
	return nil
}

// oldestWaiting returns the oldest entry without an outcome, or nil.
func (c *channel) oldestWaiting() *entry {
	if c.waiting == 0 {
		return nil
	}
	for _, e := range c.flight.all() {
		if e.batch != nil {
			return e
		}
	}
	return nil
}

// isClosed asks amqp091-go, which reports the close before it resolves the confirms.
func (c *channel) isClosed() bool {
	if !c.closed {
		select {
		case c.cause = <-c.closes:
			c.closed = true
		default:
		}
	}
	return c.closed
}

// trim drops resolved entries from the front.
func (c *channel) trim() {
	entries := c.flight.all()
	n := 0
	for n < len(entries) && entries[n].confirm == nil {
		n++
	}
	c.flight.drop(n)
	if c.unresolved == 0 {
		c.alone = false
	}
}
