package inbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
)

// journal is a log that goroutines share.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, string(line))
	return len(line), nil
}

func (j *journal) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines)
}

// After a failover the consumers' address may lead to a standby, which answers and takes
// no writes. Consumption pauses; no message fails, and the log stays short.
func TestInbox_PausesAtAStandby(t *testing.T) {
	t.Parallel()
	primary := testserver.PrivatePostgres(t)
	db := primary.Open()
	expectNoError(t, oncemill.Migrate(t.Context(), db, oncemill.Config{}, audit.Migrations, dlq.Migrations, inbox.Migrations))
	standby := primary.Standby().Open()
	eventually(t, "the standby has the tables", func() bool {
		return oncemill.CheckMigrated(t.Context(), standby, oncemill.Config{}, inbox.Migrations) == nil
	})
	for name, middleware := range map[string]func(*inbox.Inbox) message.HandlerFunc{
		"alone":     func(in *inbox.Inbox) message.HandlerFunc { return in.Middleware(effect) },
		"in groups": func(in *inbox.Inbox) message.HandlerFunc { return in.GroupMiddleware(effect) },
	} {
		var log journal
		in, err := inbox.New(standby, inbox.Config{Consumer: "stock", Logger: slog.New(slog.NewTextHandler(&log, nil))})
		expectNoError(t, err)
		handle := middleware(in)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				for ctx.Err() == nil {
					if _, err := handle(message.NewMessageWithContext(ctx, fmt.Sprint(i), nil)); err == nil {
						t.Errorf("%s: a message was handled on a standby", name)
					}
				}
			})
		}
		all.Wait()
		cancel()
		lines := log.all()
		if len(lines) > 20 || !strings.Contains(strings.Join(lines, ""), "consumption paused") {
			t.Errorf("%s: %d lines: %s", name, len(lines), strings.Join(lines[:min(10, len(lines))], ""))
		}
	}
}
