package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A key whose message is delayed or takes long holds up the messages behind it, and so the
// prefetch. RabbitMQ cannot change a consumer's prefetch, but a second consumer on the
// same channel has a prefetch of its own. So consumers are added for as many deliveries as
// such keys hold, up to Config.Backlog, and canceled when they are no longer needed. A
// queue with a single active consumer delivers nothing to added consumers.
//
// Deliveries of one channel are numbered in the order in which the broker sent them, and
// are taken in in this order, whichever consumer they are for.

const (
	// checkInterval is the time between two checks of what delayed keys hold.
	checkInterval = 50 * time.Millisecond

	// calmChecks is how many checks in a row must find more consumers than needed before
	// consumers are canceled.
	calmChecks = 20

	// longHandling is how long a message must be handed out for its key to count as delayed.
	longHandling = time.Second

	// backlogBytes bounds the payloads that delayed keys hold, in addition to their number.
	backlogBytes = 64 << 20
)

// added is a consumer beside the permanent one.
type added struct {
	tag      string
	prefetch int
	gone     bool
}

// room is how many deliveries to add consumers for.
type room struct {
	needed int // deliveries that delayed keys hold
	most   int // what Config.Backlog allows
}

// room counts the deliveries that delayed keys hold. Those of canceled consumers are not
// needed, since they take up no prefetch, but count towards Config.Backlog.
func (s *subscription) room(now time.Time) room {
	n, bytes, free := 0, 0, 0 // free: sent by consumers that were canceled
	count := func(p *delivery) {
		n, bytes = n+1, bytes+len(p.raw.Body)
		if p.by != nil && p.by.gone {
			free++
		}
	}
	for p := range s.delayed {
		count(p)
	}
	for _, l := range s.lanes {
		_, delayed := s.delayed[l.head]
		_, handedOut := s.handedOut[l.head]
		if delayed || l.head == nil || handedOut && now.Sub(l.head.out) > longHandling {
			for _, p := range l.waiting {
				count(p)
			}
			for p := range l.arrived() {
				count(p)
			}
		}
	}
	most := s.owner.settings.Backlog
	if bytes > backlogBytes/2 { // what is to come may be as large
		most = min(most, n*backlogBytes/bytes)
	}
	most = max(0, most-free)
	return room{needed: min(n-free, most), most: most}
}

// makeRoom adds consumers for the deliveries that delayed keys hold, and cancels those
// that are no longer needed. An error means that the channel is lost.
func (s *subscription) makeRoom(ctx context.Context, o *session) error {
	settings := s.owner.settings
	if settings.topology.Consume.Exclusive || settings.singleActive() {
		return nil
	}
	prefetch, r := settings.topology.Consume.Qos.PrefetchCount, s.room(time.Now())
	if r.needed*16 < prefetch {
		r.needed = 0 // not worth a consumer
	}
	there := o.acks.prefetch - prefetch
	stay, enough := len(o.more), there
	for stay > 0 && enough-o.more[stay-1].prefetch >= 2*r.needed {
		stay--
		enough -= o.more[stay].prefetch
	}
	if o.calm++; stay == len(o.more) {
		o.calm = 0
	}
	switch {
	case o.calm > calmChecks:
		o.calm = 0
		return s.cancelMore(ctx, o, stay)
	case there >= r.needed:
		return nil
	}
	// Each consumer doubles the room, if allowed, so there are few.
	if err := s.consumeMore(o, min(max(prefetch, r.needed), r.most-there, math.MaxUint16)); err != nil {
		return fmt.Errorf("add a consumer for delayed keys: %w", err)
	}
	settings.Logger.LogAttrs(ctx, slog.LevelDebug, "consumer added for delayed keys", slog.String("queue", s.queue), slog.Int("held", r.needed))
	return nil
}

const addedTag = "oncemill-more-"

// consumer returns the added consumer with this tag; nil for the permanent one.
func (o *session) consumer(tag string) *added {
	if !strings.HasPrefix(tag, addedTag) {
		return nil
	}
	for _, one := range o.more {
		if one.tag == tag {
			return one
		}
	}
	return &added{tag: tag, gone: true}
}

func (s *subscription) consumeMore(o *session, prefetch int) error {
	consume := s.owner.settings.topology.Consume
	o.made++
	tag := fmt.Sprint(addedTag, o.made)
	var deliveries <-chan amqp.Delivery
	err := o.link.within(func() (err error) {
		if err := o.channel.Qos(prefetch, 0, false); err != nil {
			return err
		}
		const autoAck, exclusive, noWait = false, false, false
		deliveries, err = o.channel.Consume(s.queue, tag, autoAck, exclusive, consume.NoLocal, noWait, consume.Arguments)
		return err
	})
	if err != nil {
		return err
	}
	o.more = append(o.more, &added{tag: tag, prefetch: prefetch})
	o.acks.prefetch += prefetch
	o.forwarders.Go(func() {
		for d := range deliveries {
			select {
			case o.others <- d:
			case <-o.ended:
				return
			}
		}
	})
	return nil
}

// cancelMore cancels the consumers that were added after the first few. Their deliveries
// stay here.
func (s *subscription) cancelMore(ctx context.Context, o *session, first int) error {
	ending := o.more[first:]
	o.more = o.more[:first:first]
	for _, one := range ending {
		one.gone = true
		o.acks.prefetch -= one.prefetch
	}
	// The forwarders may wait for us to take something in, and amqp091-go for them.
	done := make(chan error, 1)
	go func() {
		var errs []error
		for _, one := range ending {
			errs = append(errs, o.link.within(func() error { return o.channel.Cancel(one.tag, false) }))
		}
		done <- errors.Join(errs...)
	}()
	for {
		select {
		case d := <-o.others:
			s.accept(o, d)
		case err := <-done:
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("cancel consumers: %w", err)
			}
			return nil
		}
	}
}

// giveBack returns deliveries to the queue that are not being handled and have waited for
// nearly Config.AckTimeout, each with all of its lane, in order. Deliveries of other lanes
// are not affected. Returned deliveries come again at once, with the full time.
func (s *subscription) giveBack(now time.Time) {
	old := func(p *delivery) bool { return now.Sub(p.arrived) > s.maxIdle() }
	for p := range s.delayed {
		if p.lane == nil && old(p) {
			delete(s.delayed, p)
			p.returned()
		}
	}
	for _, l := range s.lanes {
		idle := slices.AppendSeq(slices.Clone(l.waiting), l.arrived())
		if _, handedOut := s.handedOut[l.head]; l.head != nil && !handedOut {
			idle = append(idle, l.head)
		}
		if slices.ContainsFunc(idle, old) {
			s.returnLane(l, now)
		}
	}
	s.ready = slices.DeleteFunc(s.ready, func(p *delivery) bool {
		if p.lane == nil && old(p) {
			p.returned()
			return true
		}
		return p.lane != nil && p.lane.head != p // returned
	})
}

// maxIdle is how long a delivery may stay here without being handled.
func (s *subscription) maxIdle() time.Duration { return s.owner.settings.AckTimeout * 8 / 10 }

// returnLane gives back what is in l and not being handled. The lane stays, and what
// arrives meanwhile waits behind it.
func (s *subscription) returnLane(l *lane, now time.Time) {
	var positions []position
	if _, handedOut := s.handedOut[l.head]; l.head != nil && !handedOut {
		positions = append(positions, position{id: l.head.id, delivery: l.head})
		delete(s.delayed, l.head)
		l.head = nil
	}
	for _, p := range l.waiting {
		positions = append(positions, position{id: p.id, delivery: p})
	}
	positions = append(positions, l.awaited...)
	for i, at := range positions {
		if at.delivery != nil {
			at.delivery.returned()
			positions[i].delivery, positions[i].behind = nil, false
		}
	}
	l.waiting, l.awaited = nil, positions
	l.until = now.Add(s.maxWait())
}

// maxWait is how long to wait for returned deliveries: less time than the deliveries
// behind them may stay.
func (s *subscription) maxWait() time.Duration {
	return min(s.owner.settings.CallTimeout, s.owner.settings.AckTimeout/4)
}

// awaitNoLonger gives up on deliveries that do not come again: another consumer has them,
// or nobody.
func (s *subscription) awaitNoLonger(now time.Time) {
	for _, l := range s.lanes {
		if len(l.awaited) == 0 || now.Before(l.until) {
			continue
		}
		l.awaitNone()
		if l.head == nil {
			s.advance(l)
		}
	}
}

// comesAgain reports whether something that was given back is to come again on a session, of a
// single active consumer. If its channel closes before, the queue has later messages of their keys
// before them for its next consumer. Nothing comes while the prefetch is full.
func (s *subscription) comesAgain(o *session) bool {
	if o.acks.open >= o.acks.prefetch || !s.owner.settings.singleActive() {
		return false
	}
	for _, l := range s.lanes {
		if len(l.awaited) > 0 {
			return true
		}
	}
	return false
}

// returned gives one delivery back.
func (p *delivery) returned() {
	if p.cancel != nil {
		p.cancel()
	}
	p.session.acks.rejected(p.raw.DeliveryTag)
	// If it fails, the channel is lost, and NotifyClose reports why.
	_ = p.raw.Nack(false, true)
}
