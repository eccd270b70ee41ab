package inbox_test

import (
	"context"
	"errors"
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

// The messages of a group share its commit, and do not know its outcome either.
func TestGroup_LostAnswerOfTheCommitIsResolvedByTheRedeliveries(t *testing.T) {
	t.Parallel()
	for name, arrives := range map[string]bool{"the commit has arrived": true, "the commit has not arrived": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := testDBs["postgresql"](t)
			cut := testserver.NewCommitCutter(t, p.dsn, arrives)
			through := *p
			through.tap = &tap{driver: p.tap.driver, dsn: cut.DSN}
			through.db = openTap(t, through.tap)
			in := through.grouping(t, 4)
			ids := numbered(4)
			cut.Arm()
			for id, err := range deliverAll(t, in, effect, newMessages(t, ids...)...) {
				if !errors.Is(err, inbox.ErrCommitUnknown) {
					t.Errorf("%s: %v", id, err)
				}
			}
			for range 2 {
				expectNoErrors(t, deliverAll(t, in, effect, newMessages(t, ids...)...))
			}
			p.expect(t, 4, 4, 0)
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
