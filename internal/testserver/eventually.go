package testserver

import (
	"testing"
	"time"
)

// Patience is how long a test waits for what must come. It is long because machines are
// slow and busy: only a test that fails waits for all of it.
const Patience = 5 * time.Minute

// Eventually waits until condition holds. what tells what is waited for:
//
//	testserver.Eventually(t, "the queue is empty", func() bool { return left() == 0 })
//
// It fails the test when that has not come within [Patience], or within ten seconds when
// the test has already failed.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for begin := time.Now(); !condition(); time.Sleep(5 * time.Millisecond) {
		if waited := time.Since(begin); waited > Patience || waited > 10*time.Second && t.Failed() {
			t.Fatalf("%s: not within %s", what, waited.Round(time.Second))
		}
	}
}
