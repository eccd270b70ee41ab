package inbox_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/propagation"

	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/nopanic/nopanictest"
)

// Telemetry that panics neither undoes an effect nor fails a message.
func TestInbox_SurvivesTelemetryThatPanics(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		var log strings.Builder
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.TracerProvider, cfg.MeterProvider, cfg.Propagator = nopanictest.Tracers{}, nopanictest.Meters{}, propagation.TraceContext{}
			cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
		})
		runs := 0
		handle := in.Middleware(func(m *message.Message) ([]*message.Message, error) {
			if runs++; m.UUID == "bad" {
				return nil, errors.New("not this one")
			}
			return nil, nil
		})
		for _, id := range []string{"a", "a", "b", "bad"} {
			m := message.NewMessage(id, nil)
			m.Metadata.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
			if _, err := handle(m); (err != nil) != (id == "bad") {
				t.Errorf("%s: %v", id, err)
			}
		}
		if runs != 3 {
			t.Errorf("the handler ran %d times", runs)
		}
		if n := strings.Count(log.String(), "telemetry panicked"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, &log)
		}
	})
}
