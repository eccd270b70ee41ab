package inbox

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// A probe that takes long may find something missing that is there again for others. It closes
// nothing then, and the log does not say that it does.
func TestInbox_LogsNoPauseForWhatAnOldProbeFinds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		in := idleInbox(t, slog.New(slog.NewTextHandler(&log, nil)))
		handle := func(id string, takes time.Duration, result outcome, err error) {
			w := &work{id: id, msg: message.NewMessage(id, nil)}
			_, _, _ = in.once(t.Context(), w, func(context.Context, *work) (outcome, error) {
				time.Sleep(takes)
				return result, err
			})
		}
		expect := func(when string, paused, resumed int) {
			t.Helper()
			if p, r := strings.Count(log.String(), "consumption paused"), strings.Count(log.String(), "consumption resumed"); p != paused || r != resumed {
				t.Errorf("%s: paused %d times, resumed %d times, want %d and %d:\n%s", when, p, r, paused, resumed, log.String())
			}
		}
		missing := Unavailable(errors.New("payments are away"))
		for _, id := range []string{"a", "b", "c"} {
			handle(id, agreementTime, outcomeHandlerFailed, missing)
		}
		expect("three find it missing", 1, 0)
		slow := make(chan struct{})
		go func() {
			defer close(slow)
			handle("slow", 3*lastProbe, outcomeHandlerFailed, missing)
		}()
		time.Sleep(firstProbe)
		synctest.Wait() // it is let through
		handle("d", 0, outcomeHandled, nil)
		expect("another probe finds it there", 1, 1)
		<-slow
		expect("the old one finds it missing", 1, 1)
		if in.gate.shut() {
			t.Error("the old probe has closed the gate")
		}
	})
}
