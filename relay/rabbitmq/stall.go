package rabbitmq

import (
	"context"
	"slices"
	"time"
)

const (
	// maxRetired is how many channels of a lane are kept for their late confirms.
	maxRetired = 2
	// retirement is how long one is kept.
	retirement = 5 * time.Minute
)

// verdict is what a lane thinks of its channel.
type verdict int

const (
	fine    verdict = iota
	stalled         // this channel does not answer, while others of its connection do
	overdue         // nothing is answered on the connection
)

// judge looks at the oldest message in flight. It is stalled if it stays without
// an answer while messages that left after it, on whichever channel, are answered:
// sooner if they are of its topic, which most likely takes them to the same queue,
// than if they are of another, whose queue may merely be faster. It is overdue when
// the connection makes no progress. What has not left yet is not unanswered, and the
// time when the broker was blocked does not count.
func (c *channel) judge(now time.Time, factor int, limit time.Duration) verdict {
	wire := c.link.net
	written := wire.written.Load()
	for _, e := range c.flight.all() {
		if e.end > written {
			break
		}
		if e.flushed.IsZero() {
			e.flushed = now
		}
	}
	e := c.oldest()
	if e == nil || c.link.blocked.Load() {
		return fine
	}
	within := func(limit time.Duration, since ...time.Time) bool {
		since = append(since, time.Unix(0, c.link.unblockedAt.Load()))
		return now.Sub(slices.MaxFunc(since, time.Time.Compare)) <= limit
	}
	switch {
	case e.flushed.IsZero():
		if !within(limit, e.since, time.Unix(0, wire.advanced.Load())) {
			return overdue
		}
	case e.route.confirmed.Load() >= e.end:
		if !within(min(limit, limit/sameTopic*time.Duration(factor)), e.flushed) {
			return stalled
		}
	case c.link.answered.Load() >= e.end:
		if !within(min(limit, limit/otherTopic*time.Duration(factor)), e.flushed) {
			return stalled
		}
	case !within(limit, e.flushed, time.Unix(0, c.link.answeredAt.Load())):
		return overdue
	}
	return fine
}

// A channel is stalled after these parts of ConfirmTimeout: 5 s and 7.5 s.
const (
	sameTopic  = 6
	otherTopic = 4
)

// patience keeps a queue that is merely slower than others from getting everything
// again and again: each replacement of a lane's channel doubles the time until the
// next one, for a while.
type patience struct {
	factor int
	since  time.Time
}

// impatience is how long a replacement counts.
const impatience = 5 * time.Minute

func (p *patience) at(now time.Time) (factor int) {
	if now.Sub(p.since) > impatience {
		p.factor = 1
	}
	return p.factor
}

func (p *patience) lost(now time.Time) {
	p.factor, p.since = min(2*p.factor, sameTopic), now
}

// until returns the time until which a new channel is believed when it nacks. A queue
// that refuses some of what it is sent must not cost a channel each time.
func (p *patience) until() time.Time { return p.since.Add(time.Duration(p.factor) * nackRest) }

const nackRest = 500 * time.Millisecond

// replaceUseless replaces a channel that only nacks, and reports whether it did.
func (l *lane) replaceUseless(ctx context.Context) bool {
	if l.channel == nil || !l.channel.useless {
		return false
	}
	l.running.settings.Logger.WarnContext(ctx, "rabbitmq channel replaced, it only nacks while others of its topic are confirmed", "lane", l.number)
	now := time.Now()
	l.patience.at(now)
	l.patience.lost(now)
	l.retire(now, interruptedNacked)
	return true
}

// retire replaces the lane's channel and goes on listening to it: what is in flight
// on it has an outcome, and its confirms count when they come. As after a loss, what
// was handed over and not sent fails too.
func (l *lane) retire(now time.Time, outcome error) {
	c := l.channel
	l.channel, l.latest = nil, nil
	clear(l.routes)
	c.retired = now
	for _, e := range c.flight.all() {
		if e.batch != nil {
			l.cut.end(e.term, outcome)
			c.giveBack(e, outcome)
		}
	}
	l.failPending(0, outcome)
	l.retired = append(l.retired, c)
	if len(l.retired) > maxRetired {
		l.dismiss(l.retired[0])
		l.retired = slices.Delete(l.retired, 0, 1)
	}
}

// tendRetired takes what has come on retired channels, and lets those go that have
// nothing more to say.
func (l *lane) tendRetired() {
	now, link := time.Now(), l.running.state.Load().link
	l.retired = slices.DeleteFunc(l.retired, func(c *channel) bool {
		if c.settle(true) && !c.isClosed() && c.link == link && c.unresolved > 0 && now.Sub(c.retired) < retirement {
			return false
		}
		l.dismiss(c)
		return true
	})
}

// dismiss ends the wait for confirms on a retired channel.
func (l *lane) dismiss(c *channel) {
	c.wreck()
	if !c.isClosed() {
		c.link.calls.put(call{discard: c})
	}
}
