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
// It fails the test when that has not come within [Patience], and gives up at once when
// the test has failed otherwise.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if t.Failed() || time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, Patience)
		}
	}
}
