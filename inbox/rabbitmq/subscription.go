package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v4"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/repeats"
)

// subscription is one Subscribe. Everything happens in one goroutine, run, except waiting
// for the outcome of each message that was handed out, which comes back through outcomes.
type subscription struct {
	owner     *Subscriber
	topic     string
	queue     string
	exchange  string
	out       chan *message.Message
	consuming atomic.Bool
	shard     *shard // nil: the queue of the topic

	ready     []*delivery // to be handed out, in this order
	delayed   map[*delivery]struct{}
	firstDue  time.Time // of the delayed
	lanes     map[string]*lane
	handedOut map[*delivery]struct{} // handed out, no outcome yet; also of lost sessions

	waiters  sync.WaitGroup // for outcomes
	abandon  chan struct{}  // closed when outcomes are no longer awaited
	outcomes outcomes

	failures  repeats.Series // of sessions
	malformed repeats.Series // deliveries that stay
}

func newSubscription(owner *Subscriber, topic, queue, exchange string) *subscription {
	return &subscription{
		owner:     owner,
		topic:     topic,
		queue:     queue,
		exchange:  exchange,
		out:       make(chan *message.Message),
		delayed:   make(map[*delivery]struct{}),
		lanes:     make(map[string]*lane),
		handedOut: make(map[*delivery]struct{}),
		abandon:   make(chan struct{}),
		outcomes:  outcomes{wake: make(chan struct{}, 1)},
	}
}

// run consumes on one session after another until ctx ends or the subscriber is closed. Without a
// current one it begins by opening one.
func (s *subscription) run(ctx context.Context, current *session) {
	settings := s.owner.settings
	log := settings.Logger.With("queue", s.queue)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // ends with this function, which cancels ctx
		select {
		case <-s.owner.closing:
			stop()
		case <-ctx.Done():
		}
	}()
	// Running handlers may finish after ctx has ended.
	handling, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()

	wait := settings.conn.Backoff
	wait.Reset()
	if current == nil {
		current = s.reopen(ctx, log, &wait)
	}
	for current != nil {
		s.consuming.Store(true)
		since := time.Now()
		err := <-nopanic.Apart(func() error { return s.consume(ctx, handling, current) })
		s.consuming.Store(false)
		if errors.Is(err, nopanic.ErrGoexit) {
			s.owner.exits.Store(true)
		}
		if err == nil || s.isGone(err) {
			break
		}
		s.settle()
		current.flush(ctx, log, flushAll) // nothing, if the channel is lost
		s.forget(current)
		current.close()
		level, attrs := s.failures.Failed(s.lossLevel(err), fmt.Sprint(err))
		log.Log(ctx, level, "rabbitmq consumer lost, consuming again", append(attrs, "uri", current.link.shown, "error", err)...)
		// A broker that accepts consumers only to drop them is still down.
		if time.Since(since) > wait.MaxInterval {
			wait.Reset()
		}
		current = s.reopen(ctx, log, &wait)
	}

	if s.shard == nil {
		close(s.out)
	}
	drain := func() error {
		s.drain(ctx, handling, current)
		return nil
	}
	for <-nopanic.Apart(drain) != nil {
		s.owner.exits.Store(true)
	}
	giveUp()
	close(s.abandon)
	s.waiters.Wait()
	// Nothing was released to other consumers while handlers of this one were running: the
	// channel was kept with its consumer, which takes no more than the prefetch. So a single
	// active consumer gives up its place, with its messages in order, when it has finished.
	if current != nil {
		current.close()
	}
	s.leave()
}

// reopen opens a session. It returns nil if ctx ends before, or the shard is gone.
func (s *subscription) reopen(ctx context.Context, log *slog.Logger, wait *backoff.ExponentialBackOff) *session {
	for s.pause(ctx, wait.NextBackOff()) {
		next, err := s.open(ctx)
		switch {
		case err == nil:
			if attrs, report := s.failures.Over(); report {
				log.InfoContext(ctx, "rabbitmq consumer restored", append(attrs, "uri", next.link.shown)...)
			}
			return next
		case s.isGone(err):
			return nil
		case ctx.Err() == nil:
			level, attrs := s.failures.Failed(slog.LevelWarn, err.Error())
			log.Log(ctx, level, "rabbitmq consume failed, retrying", append(attrs, "uri", s.owner.settings.conn.Shown(), "error", err)...)
		}
	}
	return nil
}

// ackLinger is how long acknowledgements wait for others, so that one frame covers many;
// behind an unsettled delivery they wait four times that (maxRounds). It bounds the
// deliveries that a crash may repeat in addition.
const ackLinger = 10 * time.Millisecond

// consume hands out what the session delivers until the session is lost, which it returns
// as the error, ctx ends, or the shard is to be handed over.
func (s *subscription) consume(ctx, handling context.Context, current *session) error {
	ctx, leave := context.WithCancel(ctx) // deliveries know when it ends
	defer leave()
	settings := s.owner.settings
	prefetch := settings.topology.Consume.Qos.PrefetchCount
	aging := time.NewTicker(settings.AckTimeout / 10)
	defer aging.Stop()
	checking := time.NewTicker(checkInterval)
	defer checking.Stop()
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	linger := time.NewTimer(time.Hour)
	defer linger.Stop()
	lingering := false
	for {
		var out chan<- *message.Message
		var slots chan<- struct{}
		var next *delivery
		var msg *message.Message
		for len(s.ready) > 0 && len(s.handedOut) < prefetch {
			next = s.ready[0]
			if next.note == nil {
				next.prepare(handling, s.owner, s.topic, ctx.Done())
			}
			if next.reason == nil && s.needsSlot() {
				slots = s.shard.slots
				break
			}
			if next.reason == nil {
				out, msg = s.out, next.msg
				break
			}
			malformed := next // next changes while this one is refused
			s.handOut()
			s.waiters.Go(func() { s.refuse(malformed) }) //nolint:contextcheck // the message has its own
		}
		if next == nil {
			s.freeUnused()
		}
		due.Reset(s.untilDue())
		select {
		case <-ctx.Done():
			return nil
		case <-s.yielding():
			return nil
		case slots <- struct{}{}:
			s.shard.holds = true
		case delivery, open := <-current.deliveries:
			if !open {
				return s.lossOf(current)
			}
			s.accept(current, delivery)
			s.acceptAll(current)
		case delivery := <-current.others:
			s.accept(current, delivery)
		case out <- msg:
			s.useSlot(next)
			s.handOut()
			s.waiters.Go(func() { s.await(next) })
		case <-s.outcomes.wake:
			s.settle()
			if current.acks.ripe() {
				current.flush(ctx, settings.Logger, flushRipe)
			}
			if len(current.acks.unsent) > 0 && !lingering {
				lingering = true
				linger.Reset(ackLinger)
			}
		case <-linger.C:
			current.flush(ctx, settings.Logger, flushOverdue)
			if lingering = len(current.acks.unsent) > 0; lingering {
				linger.Reset(ackLinger)
			}
		case <-due.C:
			s.release(time.Now())
		case <-checking.C:
			s.awaitNoLonger(time.Now())
			if err := s.makeRoom(ctx, current); err != nil {
				return err
			}
			if err := s.finish(ctx, current); err != nil {
				return err
			}
		case <-aging.C:
			s.giveUp(time.Now().Add(-settings.AckTimeout))
			if s.stuck(time.Now()) {
				return errStuck // all goes back together, in order
			}
			s.giveBack(time.Now())
			s.giveBackMarker(current, time.Now())
		}
	}
}

// acceptAll accepts all deliveries that have arrived, without checking everything else
// after each.
func (s *subscription) acceptAll(current *session) {
	for range cap(current.deliveries) + s.owner.settings.topology.Consume.Qos.PrefetchCount {
		select {
		case delivery, open := <-current.deliveries:
			if !open {
				return // consume notices it
			}
			s.accept(current, delivery)
		default:
			return
		}
	}
}

// lossOf returns why the deliveries of a session have ended.
func (s *subscription) lossOf(current *session) error {
	// Without an error of the channel, the broker has canceled the consumer.
	select {
	case err := <-current.lost:
		return cause(err)
	default:
		return errConsumerGone
	}
}

// accept takes a delivery, and those that have come before their turn. Deliveries are taken
// in the order of their tags.
func (s *subscription) accept(current *session, delivery amqp.Delivery) {
	if delivery.DeliveryTag != current.next {
		current.early[delivery.DeliveryTag] = delivery
		return
	}
	for here := true; here; delivery, here = current.early[current.next] {
		delete(current.early, current.next)
		current.next++
		s.take(current, delivery)
	}
}

func (s *subscription) take(current *session, raw amqp.Delivery) {
	current.acks.arrived(raw.DeliveryTag)
	s.active()
	if s.isMarker(raw) {
		s.mark(current, raw)
		return
	}
	p := &delivery{session: current, by: current.consumer(raw.ConsumerTag), raw: raw, arrived: time.Now()}
	p.read(s.owner)
	s.lineUp(p)
}

// lineUp makes p ready, or puts it behind others in its lane.
func (s *subscription) lineUp(p *delivery) {
	name := p.laneName()
	if name == "" {
		s.ready = append(s.ready, p)
		return
	}
	l, busy := s.lanes[name]
	if !busy {
		l = &lane{name: name}
		s.lanes[name] = l
	}
	p.lane = l
	switch awaited := len(l.awaited); {
	case l.enqueue(p):
		l.until = time.Now().Add(s.maxWait())
	case len(l.awaited) > awaited && s.owner.settings.singleActive():
		// A quorum queue keeps the order of deliveries, not that of messages, for its next
		// active consumer.
		l.giveBackLast()
	}
	if l.head == nil {
		s.advance(l)
	}
}

// handOut hands out the first of the ready.
func (s *subscription) handOut() {
	p := s.ready[0]
	s.ready[0] = nil
	s.ready = s.ready[1:]
	p.out = time.Now()
	s.handedOut[p] = struct{}{}
}

// await waits for the outcome of a message that was handed out.
func (s *subscription) await(p *delivery) {
	select {
	case <-p.msg.Acked():
		s.outcomes.put(outcome{delivery: p, acked: true})
	case <-p.msg.Nacked():
		s.outcomes.put(outcome{delivery: p})
	case <-s.abandon:
	}
}

// refuse passes a delivery that the marshaler could not read to Config.Malformed, which may not
// return.
func (s *subscription) refuse(p *delivery) {
	msg, reason := p.msg, p.reason
	select {
	case err := <-nopanic.Apart(func() error { return s.owner.settings.refuse(msg, reason) }):
		if err != nil {
			s.logMalformed(p, err)
		}
		s.outcomes.put(outcome{delivery: p, acked: err == nil})
	case <-s.abandon:
	}
}

func (s *settings) refuse(msg *message.Message, reason error) error {
	if s.Malformed == nil {
		return errNoMalformed
	}
	return nopanic.Call(func() error { return s.Malformed(msg.Context(), msg, reason) })
}

// settle processes the outcomes that have arrived.
func (s *subscription) settle() {
	for _, o := range s.outcomes.take() {
		p := o.delivery
		if _, expected := s.handedOut[p]; !expected {
			continue // it was given up
		}
		delete(s.handedOut, p)
		s.freeSlot(p)
		p.cancel()
		switch {
		case p.session == nil: // the broker has taken it back
			s.next(p)
		case o.acked:
			p.session.acks.ack(p.raw.DeliveryTag)
			s.next(p)
		case s.owner.settings.topology.Consume.NoRequeueOnNack && p.reason == nil:
			p.session.acks.rejected(p.raw.DeliveryTag)
			// If it fails, the channel is lost, and NotifyClose reports why.
			_ = p.raw.Nack(false, false)
			s.next(p)
		default:
			p.nacks++
			if p.note.yields.Load() {
				s.next(p)
				p.lane, p.queue = nil, true
			}
			s.delay(p, time.Now().Add(p.nackDelay(s.owner.settings)))
		}
	}
}

// stuck reports whether deliveries wait for a handler that has not returned although the
// context of its message has ended. They wait in the queue, or for a slot, if the prefetch is
// handed out.
func (s *subscription) stuck(now time.Time) bool {
	full := len(s.handedOut) >= s.owner.settings.topology.Consume.Qos.PrefetchCount || s.noSlots()
	for p := range s.handedOut {
		if now.Sub(p.arrived) > s.owner.settings.AckTimeout && (full || p.lane != nil && p.lane.behind() > 0) {
			return true
		}
	}
	return false
}

// giveUp stops waiting for handlers that do not return although the contexts of their
// messages have ended and the broker has taken the messages back.
func (s *subscription) giveUp(arrivedBefore time.Time) {
	for p := range s.handedOut {
		if p.session == nil && p.arrived.Before(arrivedBefore) {
			delete(s.handedOut, p)
			s.freeSlot(p)
			p.cancel()
			s.next(p)
		}
	}
}

// forget drops the deliveries of a lost session: the broker delivers them again. A message
// that is being handled keeps its lane until its handler has finished, so that the repeat
// does not run at the same time.
func (s *subscription) forget(lost *session) {
	for _, p := range s.ready {
		s.drop(p)
	}
	s.ready = nil
	for p := range s.delayed {
		s.drop(p)
	}
	clear(s.delayed)
	s.freeUnused() // others go on, however long this one is away
	s.inactive()
	for p := range s.handedOut {
		if p.session == lost {
			p.session = nil
		}
	}
	for name, l := range s.lanes {
		l.waiting, l.awaited = nil, nil
		if l.head == nil {
			delete(s.lanes, name)
		}
	}
}

// drop drops a delivery that is not handed out, and with it its lane.
func (s *subscription) drop(p *delivery) {
	if p.cancel != nil {
		p.cancel()
	}
	if p.lane != nil {
		delete(s.lanes, p.lane.name)
	}
}

// pause reports whether the time has passed; false means that ctx ended first. Meanwhile
// handlers of a lost session finish.
func (s *subscription) pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-s.outcomes.wake:
			s.settle()
		}
	}
}
