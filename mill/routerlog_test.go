package mill

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
)

// The errors of handlers, which the router logs one by one, do not fill the log.
func TestRouterLog_LimitsErrorsOfHandlers(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := newRouterLog(slog.New(slog.NewTextHandler(&log, nil))).With(watermill.LogFields{"subscribe_topic": "orders"})
	for range 1000 {
		l.Error("Handler returned error", errors.New("no"), watermill.LogFields{"message_uuid": "a"})
	}
	l.Error("Cannot close router", errors.New("no"), nil)
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], `level=WARN msg="handler failed" error=no message_id=a`) || !strings.Contains(lines[1], "level=ERROR") {
		t.Errorf("%d lines: %s", len(lines), log.String())
	}
}

// Another topic or error is news, and nobody fills the log with one long id.
func TestRouterLog_ShowsEachKindOfErrorAndShortIDs(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := newRouterLog(slog.New(slog.NewTextHandler(&log, nil)))
	for range 2 {
		for _, topic := range []string{"orders", "bills"} {
			for _, err := range []error{errors.New("no"), errors.New("never")} {
				l.Error("Handler returned error", err, watermill.LogFields{"message_uuid": strings.Repeat("a", 1<<20), "subscribe_topic": topic})
			}
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 4 || log.Len() > 4<<10 {
		t.Errorf("%d lines, %d bytes: %.2000s", n, log.Len(), log.String())
	}
}
