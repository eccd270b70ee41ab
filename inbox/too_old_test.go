package inbox_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/turn"
)

// The process's clock, which shows the year 2000 here, does not decide what is too old.
func TestRetry_RefusesWhatIsTooOldByTheDatabasesClock(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in, dead := p.withDeadLetters(t, func(cfg *inbox.Config) { cfg.Retention = time.Hour })
		now := time.Now()
		young := from(t, "young", delivery{createdAt: now})
		old := from(t, "old", delivery{createdAt: now.Add(-59 * time.Minute)})
		awaitRest(t, p)
		synctest.Test(t, func(t *testing.T) {
			expectNoError(t, deliverMessage(t, in, young, effect))
			expectNoError(t, deliverMessage(t, in, old, effect))
		})
		if letters := dead.all(); len(letters) != 1 || letters[0].Reason != string(inbox.ReasonTooOld) {
			t.Errorf("letters %+v", letters)
		}
	})
}

// awaitRest waits until the turn to write can be had at once. After a long transaction, here
// the migration, it rests for a moment, by a timer that would reach into the bubble.
func awaitRest(t *testing.T, p *testDB) {
	t.Helper()
	const quick = 10 * time.Millisecond // a twenty-fifth of it is too short for a rest
	for begin := time.Now(); ; begin = time.Now() {
		own, err := turn.Of(p.db).Take(t.Context(), turn.Caller)
		expectNoError(t, err)
		own.Give()
		if time.Since(begin) < quick {
			return
		}
	}
}
