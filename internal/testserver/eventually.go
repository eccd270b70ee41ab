package testserver

import (
	"context"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

// MaxWait is how long a test waits without progress before it fails. It is long because
// machines are slow and busy. Only failing tests wait that long.
const MaxWait = 5 * time.Minute

// lookEvery is the interval between two checks of a condition.
const lookEvery = 5 * time.Millisecond

// Eventually waits until condition holds. what describes the condition:
//
//	testserver.Eventually(t, "the queue is empty", func() bool { return left() == 0 })
//
// It fails the test after [MaxWait], or after ten seconds if the test has already failed.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	EventuallyMoving(t, what, condition, func() struct{} { return struct{}{} })
}

// EventuallyMoving waits until condition holds. [MaxWait] starts again whenever progress
// returns another value. Use it for work that takes long on a busy machine, such as the
// delivery of a backlog.
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

// Poll waits until condition holds and returns true, or false if ctx ends first. Unlike
// [Eventually] it may be called from any goroutine.
func Poll(ctx context.Context, condition func() bool) bool {
	for !condition() {
		if !Pause(ctx, lookEvery) {
			return false
		}
	}
	return true
}

// Pause simulates work, such as a slow handler. It returns false if ctx ends first.
func Pause(ctx context.Context, d time.Duration) bool {
	return sleep.For(ctx, d)
}
