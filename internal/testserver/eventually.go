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

// The interval between two checks of a condition is lookEvery at first and grows with the time
// waited, to lookAtLast: a check is often a query, and hundreds a second of many tests at once
// are what the machine is busy with.
const (
	lookEvery  = 5 * time.Millisecond
	lookAtLast = 40 * time.Millisecond
)

// untilNextLook returns the interval after a check, by the time waited so far.
func untilNextLook(waited time.Duration) time.Duration {
	return min(max(waited/16, lookEvery), lookAtLast)
}

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
	begin := time.Now()
	last, since := progress(), begin
	for ; !condition(); time.Sleep(untilNextLook(time.Since(begin))) {
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
	begin := time.Now()
	for !condition() {
		if !Pause(ctx, untilNextLook(time.Since(begin))) {
			return false
		}
	}
	return true
}

// Pause simulates work, such as a slow handler. It returns false if ctx ends first.
func Pause(ctx context.Context, d time.Duration) bool {
	return sleep.For(ctx, d)
}
