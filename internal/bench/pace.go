package main

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill/relay"
)

// stopwatch takes, for each message of the traffic, the time from its commit to
// its confirm.
type stopwatch struct {
	traffic              *traffic
	committed, confirmed []atomic.Int64 // nanoseconds since 1970
	left                 atomic.Int64
	all                  chan struct{}
}

func newStopwatch(t *traffic, n int) *stopwatch {
	s := &stopwatch{traffic: t, committed: make([]atomic.Int64, n), confirmed: make([]atomic.Int64, n), all: make(chan struct{})}
	s.left.Store(int64(n))
	return s
}

// confirm is called when the broker has a message.
func (s *stopwatch) confirm(id string) {
	i, err := s.traffic.index(id)
	if err != nil || i >= len(s.confirmed) {
		return
	}
	if s.confirmed[i].CompareAndSwap(0, time.Now().UnixNano()) && s.left.Add(-1) == 0 {
		close(s.all)
	}
}

// await waits for the last confirm.
func (s *stopwatch) await(ctx context.Context) error {
	select {
	case <-s.all:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w with %d messages unconfirmed", ctx.Err(), s.left.Load())
	}
}

// quantiles returns the times of the messages from first on that the given shares
// of them do not exceed, in milliseconds. A confirm may come before the commit has
// returned to the producer.
func (s *stopwatch) quantiles(first int, shares ...float64) []float64 {
	all := make([]int64, 0, len(s.confirmed)-first)
	for i := first; i < len(s.confirmed); i++ {
		all = append(all, max(0, s.confirmed[i].Load()-s.committed[i].Load()))
	}
	slices.Sort(all)
	out := make([]float64, len(shares))
	for i, share := range shares {
		out[i] = float64(all[int(share*float64(len(all)-1))]) / 1e6
	}
	return out
}

// rate returns the messages a second from the first commit to the last confirm.
func (s *stopwatch) rate() float64 {
	begin, end := s.committed[0].Load(), int64(0)
	for i := range s.confirmed {
		begin, end = min(begin, s.committed[i].Load()), max(end, s.confirmed[i].Load())
	}
	return perSecond(len(s.confirmed), time.Duration(end-begin))
}

// timedSink reports confirms to a stopwatch.
type timedSink struct {
	relay.Sink
	watch *stopwatch
}

func (s *timedSink) Publish(ctx context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	s.Sink.Publish(ctx, msgs, func(m *relay.Message, err error) {
		if err == nil {
			s.watch.confirm(m.MessageID)
		}
		done(m, err)
	})
}

func (s *timedSink) Ready() bool {
	r, ok := s.Sink.(interface{ Ready() bool })
	return !ok || r.Ready()
}

const producers = 8

// pace commits the first n messages, rate of them a second, so many in each
// transaction when it is due, whatever became of the ones before.
func (s *stopwatch) pace(ctx context.Context, rate, n, each int, commit func(ctx context.Context, first, end int) error) error {
	begin := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for p := range producers {
		group.Go(func() error {
			timer := time.NewTimer(0)
			defer timer.Stop()
			for i := p * each; i < n; i += producers * each {
				timer.Reset(time.Until(begin.Add(time.Duration(i) * time.Second / time.Duration(rate))))
				select {
				case <-timer.C:
				case <-ctx.Done():
					return ctx.Err()
				}
				end := min(i+each, n)
				if err := commit(ctx, i, end); err != nil {
					return fmt.Errorf("commit message %d: %w", i, err)
				}
				now := time.Now().UnixNano()
				for done := i; done < end; done++ {
					s.committed[done].Store(now)
				}
			}
			return nil
		})
	}
	return group.Wait()
}
