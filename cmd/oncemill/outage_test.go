package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// mostOutageLines is how long the whole log of a worker may be that lives through an outage of its
// broker.
const mostOutageLines = 40

var logTime = regexp.MustCompile(`(?m)^time=(\S+) `)

// A broker that is away for a minute, while messages are written all the time, leaves a log that
// an operator can read in a glance; and everything is delivered. With ONCEMILL_RECORD and
// ONCEMILL_LONG, the log is written to docs/terminal.
func TestRelayCommand_LogsAnOutageOfRabbitMQInAFewLines(t *testing.T) {
	t.Parallel()
	away := testserver.Rounds(8*time.Second, time.Minute)
	broker := testserver.PrivateRabbitMQ(t)
	declareQueue(t, broker.URI(), "orders")
	pg := testserver.Postgres(t)
	env := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema, "ONCEMILL_AMQP_URL=" + broker.URI()}
	runner(t, env)(0, "migrate")
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	log := &sharedOutput{}
	cmd, _ := command(t.Context(), env, "relay", "--topology", "queue", "--name", "relay-a")
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	began, written := time.Now(), 0
	write := func(span time.Duration) {
		t.Helper()
		for until := time.Now().Add(span); time.Now().Before(until); testserver.Pause(t.Context(), 100*time.Millisecond) {
			err := box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
				for range 5 {
					written++
					if err := box.Publish(ctx, tx, "orders", message.NewMessage(fmt.Sprintf("order-%d", written), nil)); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	owed := database.Of(pg.Config).Expand(`select (select count(*) from {{outbox}}) + (select count(*) from {{parked}})`)
	delivered := func() bool {
		var n int
		if err := pg.DB.QueryRowContext(t.Context(), owed).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	}
	write(2 * time.Second)
	testserver.Eventually(t, "what was written before is delivered", delivered)
	broker.GoAway()
	write(away)
	broker.ComeBack()
	write(2 * time.Second)
	testserver.Eventually(t, "everything is delivered", delivered)
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Errorf("%v: %s", err, log.String())
	}
	text := log.String()
	lines := strings.Count(text, "\n")
	if lines > mostOutageLines || lines < 6 || !strings.Contains(text, "WARN") {
		t.Errorf("%d lines, want 6 to %d:\n%s", lines, mostOutageLines, text)
	}
	t.Logf("%d messages, %v without a broker, %d lines:\n%s", written, away, lines, text)
	if os.Getenv(recordEnv) != "" && testserver.Long() {
		text = logTime.ReplaceAllStringFunc(text, func(found string) string {
			at, err := time.Parse(time.RFC3339Nano, strings.TrimSuffix(strings.TrimPrefix(found, "time="), " "))
			if err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("%+7.1fs ", at.Sub(began).Seconds())
		})
		text = strings.ReplaceAll(text, pg.Config.Schema, "oncemill")
		path := filepath.Join("..", "..", "docs", "terminal", "outage-rabbitmq.txt")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// recordEnv makes tests write docs/terminal: make recordings.
const recordEnv = "ONCEMILL_RECORD"
