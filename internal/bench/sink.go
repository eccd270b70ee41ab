package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// countingSink closes all when left messages have been confirmed, and remembers
// an outcome that was another one.
type countingSink struct {
	relay.Sink
	left    atomic.Int64
	all     chan struct{}
	problem atomic.Pointer[error]
}

func newCountingSink(sink relay.Sink, n int) *countingSink {
	s := &countingSink{Sink: sink, all: make(chan struct{})}
	s.left.Store(int64(n))
	return s
}

func (s *countingSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.Sink.Publish(ctx, msgs, func(m *relay.Message, err error) {
		done(m, err)
		switch {
		case err != nil:
			s.problem.CompareAndSwap(nil, &err)
		case s.left.Add(-1) == 0:
			close(s.all)
		}
	})
}

// Ready lets the relay see what the sink says of itself.
func (s *countingSink) Ready() bool {
	r, ok := s.Sink.(interface{ Ready() bool })
	return !ok || r.Ready()
}

func (s *countingSink) failed() error {
	if err := s.problem.Load(); err != nil {
		return fmt.Errorf("a message was not confirmed: %w", *err)
	}
	return nil
}

// ledgerSink confirms at once and checks every message. Lanes come from several
// goroutines, and no key is in two lanes, so each lane has a ledger of its own.
type ledgerSink struct {
	traffic *traffic
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

// verdict is nil if every message came once, intact, and in order per key. It is called when the relay has stopped.
func (s *ledgerSink) verdict() error { return s.judge(true) }

// arrivals is verdict without the order.
func (s *ledgerSink) arrivals() error { return s.judge(false) }

func (s *ledgerSink) judge(ordered bool) error {
	whole := newLedger(s.traffic, len(s.lanes[0].book.seen))
	for i := range s.lanes {
		whole.merge(s.lanes[i].book)
	}
	return whole.verdict(ordered)
}
