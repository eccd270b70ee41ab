// Package gauges reads what gauges report: in the background, only while somebody collects the
// metrics, and at most a hundredth of the time, unless a reading takes seconds.
package gauges

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	every  = 5 * time.Second
	wanted = 10 * time.Minute // after a collection

	// share bounds the part of the time that readings take: a hundredth.
	share   = 100
	longest = 4 * time.Minute  // between two readings, however long they take
	retry   = 20 * time.Second // at most, after a reading that failed

	forever = 1<<63 - 1
)

// Reader holds the latest reading. Use [New].
type Reader[T any] struct {
	collected chan struct{} // capacity 1: the metrics were collected
	latest    atomic.Pointer[reading[T]]
}

type reading[T any] struct {
	value T
	until time.Time // it is too old after that
}

// New returns a Reader without a reading.
func New[T any]() *Reader[T] { return &Reader[T]{collected: make(chan struct{}, 1)} }

// Collect returns the latest reading, false if there is none: the first collection has none yet.
// It never waits.
func (r *Reader[T]) Collect() (value T, ok bool) {
	select {
	case r.collected <- struct{}{}:
	default:
	}
	latest := r.latest.Load()
	if latest == nil || time.Now().After(latest.until) {
		return value, false
	}
	return latest.value, true
}

// Run reads until ctx ends. A read that returns false has no value; it may have one beside an
// error. After each that has either, report is told the error, or nil.
func (r *Reader[T]) Run(ctx context.Context, read func(context.Context) (T, bool, error), report func(error)) {
	defer r.latest.Store(nil)
	var until time.Time // somebody wants readings until then
	for {
		pause := time.Duration(forever)
		if time.Now().Before(until) {
			pause = r.read(ctx, read, report)
		} else {
			r.latest.Store(nil)
		}
		timer := time.NewTimer(pause)
		for waiting := true; waiting; {
			select {
			case <-r.collected:
				waiting = time.Now().Before(until)
				until = time.Now().Add(wanted)
			case <-timer.C:
				waiting = false
			case <-ctx.Done():
				timer.Stop()
				return
			}
		}
		timer.Stop()
	}
}

// read reads once, and returns how long to wait for the next time.
func (r *Reader[T]) read(ctx context.Context, read func(context.Context) (T, bool, error), report func(error)) time.Duration {
	begin := time.Now()
	value, ok, err := read(ctx)
	pause := min(max(every, share*time.Since(begin)), longest)
	switch {
	case ctx.Err() != nil:
		return pause
	case err != nil:
		pause = min(pause, retry)
	case !ok:
		pause = every
	}
	if ok {
		r.latest.Store(&reading[T]{value, time.Now().Add(3 * pause)})
	} else {
		r.latest.Store(nil)
	}
	if ok || err != nil {
		report(err)
	}
	return pause
}
