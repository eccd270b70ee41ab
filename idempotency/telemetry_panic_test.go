package idempotency_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/nopanic/nopanictest"
)

// Telemetry that panics changes no answer.
func TestMiddleware_SurvivesTelemetryThatPanics(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	engine := newEngine(t, &idempotency.MemoryStore{}, func(cfg *idempotency.Config) {
		cfg.Telemetry.TracerProvider, cfg.Telemetry.MeterProvider = nopanictest.Tracers{}, nopanictest.Meters{}
		cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	runs := 0
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		runs++
		w.WriteHeader(http.StatusCreated)
	}))
	for range 2 {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, post("/orders", "1"))
		if answer.Code != http.StatusCreated {
			t.Errorf("answered with %d: %s", answer.Code, answer.Body)
		}
	}
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs)
	}
	if n := strings.Count(log.String(), "telemetry panicked"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, &log)
	}
}
