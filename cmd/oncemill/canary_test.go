package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

// What must be seen nowhere.
const (
	canaryDatabase = "canary4database"
	canaryBroker   = "canary4broker"
	canaryPayload  = "canary4payload"
	canaryKey      = "canary4idempotency"
)

// seen is everything that a worker, a service and the commands have let out.
type seen struct {
	mu  sync.Mutex
	all map[string]*bytes.Buffer // guarded by mu
}

func (s *seen) writer(name string) io.Writer { return seenWriter{s, name} }

type seenWriter struct {
	s    *seen
	name string
}

func (w seenWriter) Write(p []byte) (int, error) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if w.s.all[w.name] == nil {
		w.s.all[w.name] = &bytes.Buffer{}
	}
	return w.s.all[w.name].Write(p)
}

func (s *seen) text(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.all[name]; b != nil {
		return b.String()
	}
	return ""
}

// Passwords, payloads and idempotency keys leave the process nowhere: not in logs, metrics, traces,
// errors or the output of commands, whatever fails. Only the commands that print a message do.
func TestSecrets_AreSeenNowhere(t *testing.T) {
	t.Parallel()
	out := &seen{all: map[string]*bytes.Buffer{}}
	pg := testserver.Postgres(t)
	admin := []string{"ONCEMILL_DATABASE=" + pg.DSN, "ONCEMILL_SCHEMA=" + pg.Config.Schema}
	runner(t, admin)(0, "migrate")
	role := "canary_" + pg.Schema
	exec := func(statement string) {
		t.Helper()
		if _, err := pg.DB.ExecContext(context.WithoutCancel(t.Context()), statement); err != nil {
			t.Fatal(err)
		}
	}
	exec(`create role ` + role + ` login superuser password '` + canaryDatabase + `'`)
	t.Cleanup(func() { exec(`drop owned by ` + role + ` cascade; drop role ` + role) })
	withPassword := func(text, user, password string) string {
		t.Helper()
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		u.User = url.UserPassword(user, password)
		return u.String()
	}
	env := []string{"ONCEMILL_DATABASE=" + withPassword(pg.DSN, role, canaryDatabase), "ONCEMILL_SCHEMA=" + pg.Config.Schema}
	wrong := []string{"ONCEMILL_DATABASE=" + withPassword(pg.DSN, "nobody_"+role, canaryDatabase), "ONCEMILL_SCHEMA=" + pg.Config.Schema}

	box, err := outbox.New(pg.DB, outbox.Config{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	err = box.RunInTx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		var errs []error
		for i, topic := range []string{"orders", "nowhere", "orders"} {
			m := message.NewMessage([]string{"first", "second", "third"}[i], []byte(`{"card":"`+canaryPayload+`"}`))
			m.Metadata.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
			errs = append(errs, box.Publish(ctx, tx, topic, m))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Fatal(err)
	}
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(out.writer("exported"+r.URL.Path), r.Body)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	defer collector.Close()
	uri := testserver.RabbitMQ(t)
	declareQueue(t, uri, "orders")
	relays := append([]string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL}, env...)
	flags := []string{"relay", "--topology", "queue", "--log-level", "debug", "--max-attempts", "1", "--listen", "127.0.0.1:0"}
	good, _ := command(t.Context(), append(relays, "ONCEMILL_AMQP_URL="+uri), flags...)
	broken, _ := command(t.Context(), append(relays, "ONCEMILL_AMQP_URL="+withPassword(uri, "nobody", canaryBroker)), flags...)
	good.Stderr, broken.Stderr = out.writer("relay"), out.writer("relay without its broker")
	if err := errors.Join(good.Start(), broken.Start()); err != nil {
		t.Fatal(err)
	}
	awaitHistory(t, box, 2)
	testserver.Eventually(t, "one relay is refused by its broker", func() bool { return strings.Contains(out.text("relay without its broker"), "level=WARN") })
	_, rest, _ := strings.Cut(out.text("relay"), `address=`)
	address, _, _ := strings.Cut(rest, " ")
	address = strings.TrimSpace(strings.SplitN(address, "\n", 2)[0])
	for _, path := range []string{"/metrics", "/status", "/readyz"} {
		response, err := http.Get("http://" + address + path) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(out.writer(path), response.Body)
		if err := errors.Join(err, response.Body.Close()); err != nil {
			t.Fatal(err)
		}
	}

	logger := slog.New(slog.NewTextHandler(out.writer("service"), &slog.HandlerOptions{Level: slog.LevelDebug}))
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	failingHandler(t, pg, logger, provider, meters)
	failingRequests(t, pg, logger, provider, meters)
	metrics := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(metrics, httptest.NewRequest(http.MethodGet, "/", nil))
	_, _ = out.writer("metrics of a service").Write(metrics.Body.Bytes())
	for _, span := range spans.GetSpans() {
		_, _ = io.WriteString(out.writer("spans"), span.Name+" "+span.Status.Description+" ")
		for _, a := range span.Attributes {
			_, _ = io.WriteString(out.writer("spans"), string(a.Key)+"="+a.Value.String()+" ")
		}
		for _, e := range span.Events {
			for _, a := range e.Attributes {
				_, _ = io.WriteString(out.writer("spans"), string(a.Key)+"="+a.Value.String()+" ")
			}
		}
	}

	for _, line := range []string{
		"status --json", "workers --json", "retrying --json", "inbox --json", "outbox list --json", "history list --json", "dlq --json", "dlq groups --json",
		"dlq", "audit --json", "migrate status --json", "doctor --json", "history resend --from 1h --dry-run", "dlq replay 99", "history show 99", "keys --json --state running,interrupted,completed", "jobs --json",
		"pause list --json", "dlq replay --all --dry-run", "relay --amqp-url amqp://x:" + canaryBroker + "@[",
	} {
		for _, variables := range [][]string{env, wrong} {
			cmd, printed := command(t.Context(), variables, strings.Fields(line)...)
			_ = cmd.Run() // some fail, as they must
			_, _ = out.writer("oncemill " + strings.Fields(line)[0]).Write(printed.Bytes())
			if printed.Len() == 0 {
				t.Errorf("%s printed nothing", line)
			}
		}
	}
	if shown := runner(t, env)(0, "history", "show", "1"); !strings.Contains(shown, canaryPayload) || strings.Contains(shown, canaryDatabase) {
		t.Errorf("a message is shown as %s", shown)
	}
	if err := errors.Join(good.Process.Signal(syscall.SIGTERM), broken.Process.Signal(syscall.SIGTERM), good.Wait(), broken.Wait()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"relay", "relay without its broker", "exported/v1/traces", "exported/v1/metrics", "/metrics", "/status", "service", "spans", "metrics of a service"} {
		if out.text(name) == "" {
			t.Errorf("nothing was seen of %s: the test proves nothing", name)
		}
	}
	for name := range out.all {
		text := out.text(name)
		for _, secret := range []string{canaryDatabase, canaryBroker, canaryPayload, canaryKey} {
			if i := strings.Index(text, secret); i >= 0 {
				t.Errorf("%s shows %s: %q", name, secret, text[max(0, i-200):min(len(text), i+100)])
			}
		}
	}
}

// awaitHistory waits until n messages are delivered.
func awaitHistory(t *testing.T, box *outbox.Outbox, n int) {
	t.Helper()
	testserver.Eventually(t, "messages are delivered", func() bool {
		rows, err := box.History().List(t.Context(), outbox.HistoryFilter{})
		return err == nil && len(rows) == n
	})
}

// failingHandler handles messages whose effects the server refuses. It quotes the values in the
// details of its error, or, where they are no numbers, in its text.
func failingHandler(t *testing.T, pg testserver.PG, logger *slog.Logger, provider trace.TracerProvider, meters metric.MeterProvider) {
	t.Helper()
	if _, err := pg.DB.ExecContext(t.Context(), `create table cards (number text unique check (number like 'canary%'))`); err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pg.DB, inbox.Config{Database: pg.Config, Consumer: "billing", Logger: logger, TracerProvider: provider, MeterProvider: meters})
	if err != nil {
		t.Fatal(err)
	}
	handle := in.Middleware(func(m *message.Message) ([]*message.Message, error) {
		tx, ok := inbox.TxFromContext(m.Context())
		if !ok {
			t.Error("no transaction")
			return nil, nil
		}
		statement := `insert into cards values ($1)`
		if strings.HasPrefix(string(m.Payload), "number") {
			statement = `insert into cards select cast($1::text as integer)`
		}
		_, err := tx.ExecContext(m.Context(), statement, string(m.Payload))
		return nil, err
	})
	failed := 0
	for i, payload := range []string{canaryPayload, canaryPayload, "x" + canaryPayload, "number " + canaryPayload} {
		m := message.NewMessage(fmt.Sprint("card ", i), []byte(payload))
		m.Metadata.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		if _, err := handle(m); err != nil {
			failed++
			logger.Error("it failed", "error", err) //nolint:sloglint // as a router does
		}
	}
	if failed != 3 {
		t.Errorf("%d have failed", failed)
	}
}

// failingRequests sends requests with a key to handlers and to a store that fail.
func failingRequests(t *testing.T, pg testserver.PG, logger *slog.Logger, provider trace.TracerProvider, meters metric.MeterProvider) {
	t.Helper()
	db, err := sql.Open("postgres", pg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	if err := oncemill.Migrate(t.Context(), db, pg.Config, idempotency.Migrations); err != nil {
		t.Fatal(err)
	}
	store, err := idempotency.NewSQLStore(db, idempotency.StoreConfig{Database: pg.Config})
	if err != nil {
		t.Fatal(err)
	}
	engine, err := idempotency.New(store, idempotency.Config{
		Scope: idempotency.SingleTenant(), Logger: logger, Telemetry: idempotency.TelemetryConfig{TracerProvider: provider, MeterProvider: meters},
	})
	if err != nil {
		t.Fatal(err)
	}
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }))
	send := func(body string) {
		request := httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(body))
		request.Header.Set("Idempotency-Key", `"`+canaryKey+`-0123456789"`)
		handler.ServeHTTP(httptest.NewRecorder(), request)
	}
	send(`{"card":"` + canaryPayload + `"}`)
	send(`{"card":"other"}`)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	send(`{"card":"` + canaryPayload + `"}`)
}
