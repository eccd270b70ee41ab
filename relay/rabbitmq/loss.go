package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/relay"
)

// sweep checks everything, in flight and pending, for confirms that came out of order,
// contexts that have ended, and an overdue confirm.
func (l *lane) sweep(ctx context.Context) {
	late, notSent := unavailableUnanswered, unavailableUnanswered
	link := l.running.state.Load().link
	switch {
	case link != nil && link.blocked.Load():
		late, notSent = unavailableBlocked, unavailableBlocked
	case link == nil || l.channel == nil:
		notSent = unavailableNoConnection
	}
	l.tendRetired()
	if l.channel != nil {
		l.sweepFlight(ctx, late)
	}
	l.expirePending(notSent)
}

func (l *lane) sweepFlight(ctx context.Context, late error) {
	c := l.channel
	if !c.settle(true) {
		l.lose(ctx, unavailableNoConnection)
		return
	}
	if l.replaceNacking(ctx) {
		return
	}
	c.expire(late)
	now := time.Now()
	if !c.broken.IsZero() {
		if now.Sub(c.broken) > l.running.settings.CallTimeout {
			l.lose(ctx, unavailableNoConnection)
		}
		return
	}
	switch c.assess(now, &l.grace, l.running.settings.ConfirmTimeout) {
	case conditionStalled:
		l.running.settings.Logger.WarnContext(ctx, "rabbitmq channel replaced, messages sent later were confirmed", "lane", l.number)
		l.grace.lost(now)
		l.retire(now, interruptedStalled)
	case conditionUnheard:
		l.running.settings.Logger.WarnContext(ctx, "rabbitmq channel replaced again, messages sent later were confirmed", "lane", l.number)
		l.grace.spare = false
		l.retire(now, interruptedStalled)
	case conditionOverdue:
		l.running.settings.Logger.WarnContext(ctx, "rabbitmq channel replaced, a confirm is overdue", "lane", l.number)
		l.retire(now, unavailableStalled)
	}
}

// lose gives the channel up, because it is closed or no longer useful. outcome is for
// messages without an answer, unless the channel itself has a better one.
//
// Everything passed to the sink so far becomes unavailable, including messages that were
// not sent: sent later on another channel, one of them could overtake a message of its key
// that is to be sent again. The same applies to the rest of its term.
func (l *lane) lose(ctx context.Context, outcome error) {
	c := l.channel
	l.channel, l.latest = nil, nil
	clear(l.routes)
	unknown := c.giveUp()
	cause := c.complaint()
	switch {
	case cause != nil:
		l.blame(ctx, c, unknown, cause)
		return
	case c.stray:
		outcome = unavailableStrayReturn
		l.running.settings.Logger.ErrorContext(ctx, "rabbitmq returned a message that was not in flight, channel replaced", "lane", l.number)
	case c.closed && c.cause != nil:
		outcome = unavailable("connection lost", c.cause)
	}
	if !c.closed {
		c.link.calls.put(call{discard: c})
	}
	l.abandon(c, unknown, outcome)
}

// complaint returns why the broker closed this channel; nil if it did not, or if the whole
// connection was lost.
func (c *channel) complaint() *amqp.Error {
	if c.stray || !c.closed || c.cause == nil || !c.cause.Server || c.link.conn.IsClosed() {
		return nil
	}
	return c.cause
}

// blame handles a channel that the broker closed because of a message. Which message it
// was is known only if one was in flight.
func (l *lane) blame(ctx context.Context, c *channel, unknown []*entry, cause *amqp.Error) {
	l.running.settings.Logger.WarnContext(ctx, "rabbitmq closed a channel", "lane", l.number,
		"code", cause.Code, "reason", cause.Reason, "in_flight", len(unknown))
	outcome := relay.Unavailable(fmt.Errorf("channel closed: %w", cause))
	if cause.Code == amqp.NotFound {
		c.link.forgetDeclared()
	}
	if len(unknown) != 1 {
		l.isolated.add(unknown)
		l.abandon(c, unknown, outcome)
		return
	}
	culprit := unknown[0].message
	l.isolated.add(unknown)
	switch cause.Code {
	case amqp.PreconditionFailed, amqp.ContentTooLarge:
		// It stays isolated: the relay may try it again.
		outcome = relay.Refused(&RejectedError{Code: cause.Code, Reason: cause.Reason})
		l.conclude(c, unknown, outcome)
	default:
		l.isolated.addTopic(culprit.Topic)
		l.conclude(c, unknown, outcome)
		l.failTopic(culprit.Topic, outcome)
	}
}

// conclude gives messages of a channel that is lost their outcome.
func (l *lane) conclude(c *channel, entries []*entry, outcome error) {
	unavailable := errors.Is(outcome, relay.ErrUnavailable)
	for _, e := range entries {
		if unavailable {
			l.cut.end(e.term, outcome)
		}
		c.conclude(e, outcome)
	}
}

// abandon gives the messages of a lost channel, and all pending messages, their outcome.
func (l *lane) abandon(c *channel, unknown []*entry, outcome error) {
	l.conclude(c, unknown, outcome)
	l.failPending(0, outcome)
}

// failPending gives all pending messages, except the keep oldest, their outcome.
func (l *lane) failPending(keep int, outcome error) {
	items := l.pending.all()[keep:]
	for _, it := range items {
		l.cut.end(it.batch.term, outcome)
		it.batch.done(it.message, outcome)
	}
	l.pending.cut(keep)
}

// failTopic gives the pending messages of one topic their outcome. Those of other topics
// continue, but the rest of the term does not: it may be of the same key.
func (l *lane) failTopic(topic string, outcome error) {
	items := l.pending.all()
	kept := 0
	for _, it := range items {
		if it.message.Topic == topic {
			l.cut.end(it.batch.term, outcome)
			it.batch.done(it.message, outcome)
		} else {
			items[kept] = it
			kept++
		}
	}
	l.pending.cut(kept)
}

// expirePending makes the first pending message whose time has ended unavailable, and all
// behind it, because they must not overtake it.
func (l *lane) expirePending(outcome error) {
	for i, it := range l.pending.all() {
		if it.batch.hasEnded() {
			l.failPending(i, outcome)
			return
		}
	}
}

// close gives everything its outcome when the sink stops.
func (l *lane) close() {
	for _, c := range l.retired {
		c.giveUp()
	}
	if c := l.channel; c != nil {
		l.conclude(c, c.giveUp(), unavailableNotRunning)
	}
	l.failPending(0, unavailableNotRunning)
	for _, b := range l.inbox.close() {
		for _, m := range b.msgs {
			b.done(m, unavailableNotRunning)
		}
	}
}
