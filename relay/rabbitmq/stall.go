package rabbitmq

import (
	"context"
	"slices"
	"time"
)

const (
	// maxRetired is how many channels of a lane are kept for their late confirms.
	maxRetired = 2
	// retirement is how long a retired channel is kept.
	retirement = 5 * time.Minute
)

// condition is the state of a channel, as its lane assesses it.
type condition int

const (
	conditionFine    condition = iota
	conditionStalled           // this channel does not answer, while others of its connection do
	conditionUnheard           // nor did it ever, since it replaced one that was stalled
	conditionOverdue           // nothing is answered on the connection
)

// assess judges the channel by the oldest message in flight. The channel is stalled if
// that message stays unanswered while messages sent after it, on any channel, are
// answered. This takes less time if they are of its topic, which most likely leads to the
// same queue, than if they are of another, whose queue may merely be faster. It is overdue
// when the connection makes no progress. A message that has not been sent does not count
// as unanswered, and the time when the broker was blocked does not count.
func (c *channel) assess(now time.Time, g *grace, limit time.Duration) condition {
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
		return conditionFine
	}
	factor := g.at(now)
	within := func(limit time.Duration, since ...time.Time) bool {
		since = append(since, time.Unix(0, c.link.unblockedAt.Load()))
		return now.Sub(slices.MaxFunc(since, time.Time.Compare)) <= limit
	}
	switch {
	case e.flushed.IsZero():
		if !within(limit, e.since, time.Unix(0, wire.advanced.Load())) {
			return conditionOverdue
		}
	case e.route.confirmed.Load() >= e.end:
		if e.overtaken.IsZero() {
			e.overtaken = now
		}
		patience, early := limit/sameTopic*time.Duration(factor), g.spare && e.route.confirmedOn != c
		if early {
			patience = limit / unheard
		}
		switch {
		case within(min(limit, patience), e.flushed) || within(limit/unheard, e.overtaken):
		case early:
			return conditionUnheard
		default:
			return conditionStalled
		}
	case c.link.answered.Load() >= e.end:
		if !within(min(limit, limit/otherTopic*time.Duration(factor)), e.flushed) {
			return conditionStalled
		}
	case !within(limit, e.flushed, time.Unix(0, c.link.answeredAt.Load())):
		return conditionOverdue
	}
	return conditionFine
}

// A channel is stalled after these fractions of ConfirmTimeout: 5 s and 7.5 s.
const (
	sameTopic  = 6
	otherTopic = 4
)

// unheard is the fraction of ConfirmTimeout for which later messages of a topic must have been
// confirmed: 1 s. When a queue has elected a leader, the confirms of all channels come soon. It is
// also the time after which a channel that replaced a stalled one is replaced itself, once, if
// nothing of the topic was confirmed on it: one that first publishes to a quorum queue whose
// leader is frozen is not told of the next leader, until the node is back or counts as down after
// a minute. One that has published before is. A channel that is about to be replaced waits as long for
// its last answers, and so do messages for a connection.
const unheard = 30

// grace keeps a queue that is merely slower than others from getting everything
// repeatedly. For a while, each replacement of a lane's channel doubles the time until the
// next one.
type grace struct {
	factor  int
	since   time.Time
	renewed int  // times in a row
	spare   bool // the channel that replaced the last one may itself be replaced early
}

// graceMemory is how long a replacement counts.
const graceMemory = 5 * time.Minute

func (g *grace) at(now time.Time) (factor int) {
	if now.Sub(g.since) > graceMemory {
		g.factor, g.renewed, g.spare = 1, 0, false
	}
	return g.factor
}

func (g *grace) lost(now time.Time) {
	g.factor, g.since, g.spare = min(2*g.factor, sameTopic), now, true
}

// until returns the time until which the nacks of a new channel are trusted. A queue that
// refuses some of its messages must not cost a channel each time.
func (g *grace) until() time.Time { return g.since.Add(time.Duration(g.factor) * nackRest) }

const nackRest = 500 * time.Millisecond

// renewal returns when a new channel is too old for a topic that it has only nacked. Each
// renewal costs other topics a pause, and a queue that is full nacks on any channel: so each
// doubles the time to the next one.
func (g *grace) renewal(now time.Time) time.Time {
	g.at(now)
	return now.Add(firstRenewal << g.renewed)
}

const (
	firstRenewal = 3 * time.Second
	mostRenewals = 6 // then the time stays the same, and shorter than graceMemory
)

// replaceNacking replaces a channel that only nacks a topic, and reports whether it did. What is in
// flight on it, of other topics, would be sent again: so it first waits for that, but not for long.
func (l *lane) replaceNacking(ctx context.Context) bool {
	c, now := l.channel, time.Now()
	switch {
	case c == nil || !c.useless && !c.tooOld:
		return false
	case c.leaving.IsZero():
		c.leaving = now
	}
	since := time.Unix(0, max(c.leaving.UnixNano(), c.link.unblockedAt.Load()))
	if c.waiting > 0 && (c.link.blocked.Load() || now.Sub(since) <= l.running.settings.ConfirmTimeout/unheard) {
		return false
	}
	switch {
	case c.useless:
		l.running.settings.Logger.WarnContext(ctx, "rabbitmq channel replaced, it only nacks while others of its topic are confirmed", "lane", l.number, "in_flight", c.waiting)
		l.grace.at(now)
		l.grace.lost(now)
	default:
		l.running.settings.Logger.DebugContext(ctx, "rabbitmq channel replaced, it only nacks a topic", "lane", l.number, "in_flight", c.waiting)
		l.grace.at(now)
		l.grace.renewed, l.grace.since = min(l.grace.renewed+1, mostRenewals), now
	}
	l.retire(now, interruptedNacked)
	return true
}

// retire replaces the lane's channel but keeps listening to it. What is in flight on it
// has an outcome, and its confirms still count. As after a loss, messages that were passed
// to the sink but not sent fail too.
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

// tendRetired settles what the broker has answered on retired channels, and dismisses those
// from which nothing more is expected.
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
	c.giveUp()
	if !c.isClosed() {
		c.link.calls.put(call{discard: c})
	}
}
