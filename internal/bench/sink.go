package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

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
			problem := err // err itself would be allocated for each message
			s.problem.CompareAndSwap(nil, &problem)
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

// ledgerSink confirms after a delay, or at once, and checks every message.
type ledgerSink struct {
	delay time.Duration
	mu    sync.Mutex // lanes come from several goroutines
	book  *ledger    // guarded by mu
}

// newLedgerSink expects the first n messages of the traffic.
func newLedgerSink(t *traffic, n int) *ledgerSink { return &ledgerSink{book: newLedger(t, n)} }

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
	s.mu.Lock()
	for _, m := range msgs {
		s.book.arrive(m.MessageID, m.Payload)
	}
	s.mu.Unlock()
	for _, m := range msgs {
		done(m, nil)
	}
}

// check returns nil if every message came once, intact and, if ordered is set, in order per
// key. It is called when the relay has stopped.
func (s *ledgerSink) check(ordered bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.book.check(ordered)
}
