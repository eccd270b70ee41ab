package inbox_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/inbox"
)

// The process's clock, which shows the year 2000 here, does not decide what is too old.
func TestRetry_RefusesWhatIsTooOldByTheDatabasesClock(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retention = time.Hour })
		now := time.Now()
		young := from(t, "young", delivery{createdAt: now})
		old := from(t, "old", delivery{createdAt: now.Add(-59 * time.Minute)})
		synctest.Test(t, func(t *testing.T) {
			expectNoError(t, deliverMessage(t, in, young, effect))
			expectNoError(t, deliverMessage(t, in, old, effect))
		})
		if letters := dead.all(); len(letters) != 1 || letters[0].Reason != string(inbox.ReasonTooOld) {
			t.Errorf("letters %+v", letters)
		}
	})
}
