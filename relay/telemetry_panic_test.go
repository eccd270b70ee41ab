package relay_test

import (
	"bytes"
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/propagation"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/nopanic/nopanictest"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

type nothing struct{}

func (nothing) Publish(string, ...*message.Message) error { return nil }
func (nothing) Close() error                              { return nil }

// lockedBuffer is a log that is read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Delivery does not depend on telemetry. And a worker that stops logs what it has done since the
// last summary.
func TestRun_SurvivesTelemetryThatPanics(t *testing.T) {
	t.Parallel()
	db := testserver.SQLite(t)
	if err := oncemill.Migrate(t.Context(), db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations); err != nil {
		t.Fatal(err)
	}
	box, err := outbox.New(db, outbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	const messages = 50
	err = box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		for range messages {
			m := message.NewMessage(watermill.NewUUID(), nil)
			m.Metadata.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
			if err := box.Publish(ctx, tx, "orders", m); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	log := &lockedBuffer{}
	worker, err := relay.New(box, relay.FromPublisher(nothing{}), relay.Config{
		Logger: slog.New(slog.NewTextHandler(log, nil)), TracerProvider: nopanictest.Tracers{}, MeterProvider: nopanictest.Meters{}, Propagator: propagation.TraceContext{},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- worker.Run(ctx) }()
	testserver.Eventually(t, "all are delivered", func() bool {
		rows, err := box.History().List(t.Context(), outbox.HistoryFilter{})
		if err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-ended:
			t.Fatalf("the worker has ended: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		return len(rows) == messages
	})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for what, n := range map[string]int{`panic="no tracer"`: 1, `panic="no meter"`: 1, `msg="messages relayed" worker=`: 1, " delivered=50 ": 1} {
		if got := strings.Count(log.String(), what); got != n {
			t.Errorf("%q is logged %d times, want %d:\n%s", what, got, n, log)
		}
	}
}
