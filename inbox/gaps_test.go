package inbox

import (
	"testing"
	"testing/synctest"
	"time"
)

// A message that came too early, and that another process has handled, holds up nothing
// that comes later.
func TestGaps_OneThatWentElsewhereHoldsUpNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const gapWait = 30 * time.Second
		g := gaps{jitter: jitter}
		g.wait("k", "2", 2)
		g.again("k", "2", gapWait)
		for _, id := range []string{"3", "4", "5"} { // the key goes on
			time.Sleep(8 * time.Hour)
			g.forget("k", id)
		}
		g.wait("k", "7", 7) // 6 is a moment late
		if again := g.again("k", "7", gapWait); again > 2*comeAgain {
			t.Errorf("7 comes again in %v", again)
		}
		g.forget("k", "6")
		g.forget("k", "7")
		if g.behind("k", 8, gapWait) {
			t.Error("8 waits for one that went elsewhere")
		}
	})
}

// However long one is missing, those behind it look again within GapWait.
func TestGaps_LookAgainInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const gapWait = 30 * time.Second
		g := gaps{jitter: jitter}
		g.wait("k", "2", 2)
		time.Sleep(24 * time.Hour)
		if again := g.again("k", "2", gapWait); again > 2*gapWait {
			t.Errorf("2 comes again in %v", again)
		}
	})
}
