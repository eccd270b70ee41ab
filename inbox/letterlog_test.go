package inbox_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
)

// A dead letter with another reason does not hide behind a thousand of one, and nobody fills
// the log with a long key.
func TestInbox_LogsEachKindOfDeadLetterAtOnce(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		expectNoError(t, migrateRelay(t, p))
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.DeadLetters, cfg.Logger = letters, slog.New(slog.NewTextHandler(&log, nil))
		})
		for i := range 20 {
			msg := routed(t, fmt.Sprint(i), "results")
			msg.Metadata.Set(outbox.KeyMetadata, strings.Repeat("k", 10_000))
			expectNoError(t, deliverMessage(t, in, msg, func(*message.Message) ([]*message.Message, error) { return nil, inbox.Permanent(errUndo) }))
		}
		expectNoError(t, deliverMessage(t, in, routed(t, strings.Repeat("i", 1<<20), "results"), effect))
		for _, c := range []struct {
			reason inbox.Reason
			lines  int
		}{{inbox.ReasonPermanent, 1}, {inbox.ReasonNoMessageID, 1}} {
			if n := strings.Count(log.String(), "reason="+string(c.reason)+" "); n != c.lines {
				t.Errorf("%d lines with the reason %s", n, c.reason)
			}
		}
		for line := range strings.Lines(log.String()) {
			if len(line) > 2048 {
				t.Errorf("a line of %d bytes: %.300s", len(line), line)
			}
		}
	})
}
