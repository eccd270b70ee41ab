package inbox

import (
	"testing"
	"testing/synctest"
	"time"
)

// The clock of the process shows the year 2000 here.
func TestClock_FollowsTheDatabaseWhateverTheProcessShows(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ offset, want time.Duration }{
		"the process is behind":   {20 * time.Hour, 23 * time.Hour},
		"the process is ahead":    {-20 * time.Hour, 3 * time.Hour},
		"the process is about it": {0, 3 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start, known := time.Now(), clock{}
				if got := known.latest(); !got.IsZero() {
					t.Errorf("knows %v though nobody has asked", got)
				}
				known.set(start.Add(c.offset))
				time.Sleep(3 * time.Hour)
				if got := known.latest().Sub(start); got != c.want {
					t.Errorf("%v after the start, want %v", got, c.want)
				}
			})
		})
	}
}
