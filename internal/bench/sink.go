package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// countdown waits for a number of events.
type countdown struct {
	left atomic.Int64
	all  chan struct{}
}

func newCountdown(n int) *countdown {
	c := &countdown{all: make(chan struct{})}
	c.left.Store(int64(n))
	return c
}

func (c *countdown) count() {
	if c.left.Add(-1) == 0 {
		close(c.all)
	}
}

func (c *countdown) await(ctx context.Context) error {
	select {
	case <-c.all:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w with %d messages left", ctx.Err(), c.left.Load())
	}
}

// watchedSink reports confirms, and remembers another outcome.
type watchedSink struct {
	relay.Sink
	confirmed func(*relay.Message)
	problem   atomic.Pointer[error]
}

func (s *watchedSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.Sink.Publish(ctx, msgs, func(m *relay.Message, err error) {
		done(m, err)
		if err != nil {
			s.problem.CompareAndSwap(nil, &err)
			return
		}
		s.confirmed(m)
	})
}

// Ready lets the relay see whether the sink is ready.
func (s *watchedSink) Ready() bool {
	r, ok := s.Sink.(interface{ Ready() bool })
	return !ok || r.Ready()
}

func (s *watchedSink) failed() error {
	if err := s.problem.Load(); err != nil {
		return fmt.Errorf("a message was not confirmed: %w", *err)
	}
	return nil
}

// watchedPublisher reports what stock Watermill has published with confirms.
type watchedPublisher struct {
	message.Publisher
	confirmed func(id string)
}

func (p *watchedPublisher) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(topic, messages...); err != nil {
		return err
	}
	for _, m := range messages {
		p.confirmed(m.UUID)
	}
	return nil
}

// ledgerSink confirms after a delay, or at once, and checks every message. Lanes come from
// several goroutines, and no key is in two lanes, so each lane has its own ledger.
type ledgerSink struct {
	traffic *traffic
	delay   time.Duration
	lanes   [outbox.Lanes]struct {
		mu   sync.Mutex
		book *ledger // guarded by mu
	}
}

// newLedgerSink expects the first n messages of the traffic.
func newLedgerSink(t *traffic, n int) *ledgerSink {
	s := &ledgerSink{traffic: t}
	for i := range s.lanes {
		s.lanes[i].book = newLedger(t, n)
	}
	return s
}

func (s *ledgerSink) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (s *ledgerSink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	if s.delay > 0 {
		time.AfterFunc(s.delay, func() { s.confirm(msgs, done) })
		return
	}
	s.confirm(msgs, done)
}

func (s *ledgerSink) confirm(msgs []*relay.Message, done func(*relay.Message, error)) {
	lane := &s.lanes[msgs[0].Lane] // a call brings messages of one lane
	lane.mu.Lock()
	for _, m := range msgs {
		lane.book.arrive(m.MessageID, m.Payload)
	}
	lane.mu.Unlock()
	for _, m := range msgs {
		done(m, nil)
	}
}

// verdict is nil if every message came once, intact and, if ordered is set, in order per
// key. It is called when the relay has stopped.
func (s *ledgerSink) verdict(ordered bool) error {
	whole := newLedger(s.traffic, len(s.lanes[0].book.seen))
	for i := range s.lanes {
		whole.merge(s.lanes[i].book)
	}
	return whole.verdict(ordered)
}
