//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

// shutter is a publisher that refuses everything until it is open.
type shutter struct{ open atomic.Bool }

func (s *shutter) Publish(string, ...*message.Message) error {
	if !s.open.Load() {
		return relay.Refused(errors.New("no such exchange"))
	}
	return nil
}

func (s *shutter) Close() error { return nil }

// A replay job and its progress, on a real relay. How fast it is differs each time, so the kept
// recording has to fit its terminal, and the end has to be right.
func TestRecordings_FollowAReplayJob(t *testing.T) {
	testserver.NeedsLong(t)
	t.Parallel()
	const dead = 600
	for _, columns := range []int{80, 120} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			t.Parallel()
			pg := testserver.Postgres(t)
			env := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
			runner(t, env)(0, "migrate")
			sink := failedOrders(t, pg, dead)
			sink.open.Store(true) // the exchange is there now
			const args = "dlq replay --all --canary 10 --rate 100 --reason fixed --by ada"
			out, code := terminal(t, columns, env, false, strings.Fields(args)...)
			if code != 0 || !strings.Contains(out, fmt.Sprintf("%d of %d done", dead, dead)) {
				t.Fatalf("exit code %d: %q", code, out)
			}
			states := strings.Split(strings.TrimSpace(out), "\r\x1b[K")
			var text strings.Builder
			text.WriteString("$ oncemill " + args + "\n")
			for i, state := range states {
				if i%4 == 1 || i == len(states)-1 { // one line is written again and again: some of its states
					text.WriteString(normalized(state, pg.Config.Schema) + "\n")
				}
			}
			jobs, _ := terminal(t, columns, env, false, "jobs")
			text.WriteString("$ oncemill jobs\n" + normalized(jobs, pg.Config.Schema))
			fits(t, "dlq-replay-job", text.String(), columns)
			path := filepath.Join("..", "..", "docs", "terminal", fmt.Sprintf("dlq-replay-job.%d.txt", columns))
			if os.Getenv(recordEnv) != "" {
				if err := os.WriteFile(path, []byte(text.String()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			kept, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			fits(t, path, string(kept), columns)
		})
	}
}

// failedOrders runs a relay whose publisher has refused so many messages for good.
func failedOrders(t *testing.T, pg testserver.PG, dead int) *shutter {
	t.Helper()
	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	msgs := make([]*message.Message, dead)
	for i := range msgs {
		msgs[i] = message.NewMessage(fmt.Sprintf("order-%d", i), []byte("{}"))
	}
	tx, err := pg.DB.BeginTx(t.Context(), nil)
	if err == nil {
		err = errors.Join(box.Publish(t.Context(), tx, "orders", msgs...), tx.Commit())
	}
	if err != nil {
		t.Fatal(err)
	}
	sink := &shutter{}
	worker, err := relay.New(box, relay.FromPublisher(sink), relay.Config{
		Name: "relay-a", Lease: 3 * time.Second, Retry: relay.Retry{MaxAttempts: 1}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	letters, err := dlq.New(pg.DB, dlq.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	count := func() (n int64) {
		groups, err := letters.Groups(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range groups {
			n += g.Count
		}
		return n
	}
	testserver.EventuallyMoving(t, "dead letters", func() bool { return count() == int64(dead) }, count)
	return sink
}
