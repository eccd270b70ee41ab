package inbox

import (
	"testing"
	"time"
)

// A step takes long if a publisher hangs. What an operator then asks to be replayed waits for a minute at most.
func TestReplays_WaitForAMinuteAtMost(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		0: time.Second, 40 * time.Millisecond: time.Second, time.Second: 20 * time.Second, 10 * time.Second: time.Minute, time.Hour: time.Minute,
	} {
		if got := replayWait(took); got != want {
			t.Errorf("after a step of %s: %s, want %s", took, got, want)
		}
	}
}
