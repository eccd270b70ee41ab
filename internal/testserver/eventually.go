package testserver

import (
	"context"
	"testing"
	"time"
)

// MaxWait is how long a test waits for what must come while nothing moves. It is long
// because machines are slow and busy: only a test that fails waits for all of it.
const MaxWait = 5 * time.Minute

// lookEvery is the time between two looks at what is awaited.
const lookEvery = 5 * time.Millisecond

// Eventually waits until condition holds. what describes what is awaited:
//
//	testserver.Eventually(t, "the queue is empty", func() bool { return left() == 0 })
//
// It fails the test when that has not come within [MaxWait], or within ten seconds when
// the test has already failed.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	EventuallyMoving(t, what, condition, func() struct{} { return struct{}{} })
}

// EventuallyMoving waits until condition holds, for as long as progress moves: [MaxWait]
// begins anew whenever progress returns another value. It suits what takes long on a busy
// machine, such as the delivery of a backlog.
func EventuallyMoving[P comparable](t testing.TB, what string, condition func() bool, progress func() P) {
	t.Helper()
	last, since := progress(), time.Now()
	for ; !condition(); time.Sleep(lookEvery) {
		if now := progress(); now != last {
			last, since = now, time.Now()
		}
		if waited := time.Since(since); waited > MaxWait || waited > 10*time.Second && t.Failed() {
			t.Fatalf("%s: nothing has moved for %s; the last state is %v", what, waited.Round(time.Second), last)
		}
	}
}

// Poll waits until condition holds and returns true, or false if ctx ends before. Unlike
// [Eventually] it may be called in any goroutine.
func Poll(ctx context.Context, condition func() bool) bool {
	for !condition() {
		if !Pause(ctx, lookEvery) {
			return false
		}
	}
	return true
}

// Pause is time that a simulated workload takes, such as a slow handler. It returns false
// if ctx ends before.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
