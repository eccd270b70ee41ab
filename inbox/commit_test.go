package inbox_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestPostgres_LostAnswerOfTheCommitIsResolvedByTheRedelivery(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrives bool
		runs    int
	}{
		"the commit has arrived":     {arrives: true, runs: 1},
		"the commit has not arrived": {arrives: false, runs: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			cut := testserver.NewCommitCutter(t, p.dsn, c.arrives)
			through := *p
			through.tap = &tap{driver: p.tap.driver, dsn: cut.DSN}
			through.db = openTap(t, through.tap)
			in := through.inbox(t, nil)
			runs := 0
			handler := func(msg *message.Message) ([]*message.Message, error) {
				runs++
				return returns("b")(msg)
			}
			msg := routed(t, "a", "results")
			cut.Arm()
			expectError(t, deliverMessage(t, in, msg, handler), inbox.ErrCommitUnknown)
			expectNoError(t, deliverMessage(t, in, msg, handler))
			expectNoError(t, deliverMessage(t, in, msg, handler))
			p.expect(t, 1, 1, 1)
			if runs != c.runs {
				t.Errorf("the handler ran %d times", runs)
			}
		})
	}
}

// As pgx does when the context ends while it waits for the answer.
func TestInbox_ContextThatEndsDuringTheCommitLeavesItsOutcomeUnknown(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		in := p.inbox(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		p.tap.committed = func(error) error {
			cancel()
			return fmt.Errorf("receive message: %w", ctx.Err())
		}
		expectError(t, deliverMessage(t, in, message.NewMessageWithContext(ctx, "a", nil), effect), inbox.ErrCommitUnknown)
		p.tap.committed = nil
		expectNoError(t, deliver(t, in, "a", effect))
		p.expect(t, 1, 1, 0)
	})
}
