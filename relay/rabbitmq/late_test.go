package rabbitmq

import (
	"errors"
	"testing"

	"github.com/oncemill/oncemill/relay"
)

// A batch that is handed over while an earlier one of its lane fails could overtake
// what comes again of that: it fails too.
func TestLane_FailsWhatIsHandedOverBeforeAFailureIsTold(t *testing.T) {
	l := newLane(&running{settings: &settings{Config: Config{Window: 10}}}, 0)
	outcome := errors.New("connection lost")
	var failed []string
	note := func(m *relay.Message, err error) {
		if errors.Is(err, outcome) {
			failed = append(failed, m.MessageID)
		}
	}
	late := newBatch(t.Context(), []*relay.Message{{MessageID: "late"}}, note)
	early := newBatch(t.Context(), []*relay.Message{{MessageID: "early"}}, func(m *relay.Message, err error) {
		l.inbox.put(late) // nobody can know yet
		note(m, err)
	})
	l.inbox.put(early)
	l.receive()
	l.failPending(0, outcome)
	if len(failed) != 2 || failed[0] != "early" || failed[1] != "late" {
		t.Errorf("failed: %v", failed)
	}
}
