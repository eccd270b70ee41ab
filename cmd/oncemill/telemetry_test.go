package main

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	dto "github.com/prometheus/client_model/go"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	metricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	tracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/outbox"
)

func TestReadExports_FollowsTheStandardVariables(t *testing.T) {
	t.Parallel()
	const (
		exporter = "OTEL_METRICS_EXPORTER="
		endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318"
		grpc     = "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
	)
	for name, c := range map[string]struct {
		env   []string
		want  exports
		wrong string // what the error names
	}{
		"nothing":               {},
		"empty is unset":        {env: []string{exporter, "OTEL_EXPORTER_OTLP_ENDPOINT="}},
		"an endpoint":           {env: []string{endpoint}, want: exports{metrics: true, traces: true}},
		"one for traces":        {env: []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://collector/v1/traces"}, want: exports{traces: true}},
		"an exporter":           {env: []string{exporter + "otlp"}, want: exports{metrics: true}},
		"both exporters":        {env: []string{exporter + "otlp, prometheus"}, want: exports{metrics: true, prometheus: true}},
		"no metrics":            {env: []string{endpoint, exporter + "none"}, want: exports{traces: true}},
		"only prometheus":       {env: []string{endpoint, exporter + "prometheus"}, want: exports{prometheus: true, traces: true}},
		"disabled":              {env: []string{endpoint, grpc, exporter + "bogus", "OTEL_SDK_DISABLED=TRUE"}, want: exports{disabled: true}},
		"HTTP":                  {env: []string{endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"}, want: exports{metrics: true, traces: true}},
		"gRPC":                  {env: []string{endpoint, grpc}, wrong: "OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf"},
		"gRPC for nothing":      {env: []string{grpc}}, // set for other programs of the machine
		"gRPC for metrics":      {env: []string{endpoint, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=grpc"}, wrong: "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"},
		"gRPC for traces":       {env: []string{endpoint, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc"}, wrong: "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"},
		"gRPC overridden":       {env: []string{endpoint, grpc, "OTEL_TRACES_EXPORTER=none", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=http/protobuf"}, want: exports{metrics: true}},
		"unknown exporter":      {env: []string{exporter + "console"}, wrong: "OTEL_METRICS_EXPORTER: must be of otlp, none, prometheus"},
		"prometheus for traces": {env: []string{"OTEL_TRACES_EXPORTER=prometheus"}, wrong: "OTEL_TRACES_EXPORTER: must be of otlp, none"},
		"none and another":      {env: []string{exporter + "none,otlp"}, wrong: "none excludes"},
		"no URL":                {env: []string{"OTEL_EXPORTER_OTLP_ENDPOINT=a:hunter2@localhost:4318"}, wrong: "OTEL_EXPORTER_OTLP_ENDPOINT: must be a URL"},
		"other scheme":          {env: []string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=ftp://a:hunter2@localhost"}, wrong: "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: must be a URL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env := map[string]string{}
			for _, v := range c.env {
				name, value, _ := strings.Cut(v, "=")
				env[name] = value
			}
			got, err := readExports(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
			switch {
			case c.wrong == "" && (err != nil || got != c.want):
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			case c.wrong != "" && (err == nil || !strings.Contains(err.Error(), c.wrong)):
				t.Errorf("error %v, want %q", err, c.wrong)
			case err != nil && strings.Contains(err.Error(), "hunter2"):
				t.Errorf("shows a secret: %v", err)
			}
		})
	}
}

// collector receives OTLP over HTTP, as a real one does.
type collector struct {
	*httptest.Server

	mu       sync.Mutex // guards what follows
	metrics  map[string]float64
	spans    []string
	resource map[string]string
	bad      []error
}

func newCollector(t *testing.T) *collector {
	c := &collector{metrics: map[string]float64{}, resource: map[string]string{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/metrics", func(w http.ResponseWriter, r *http.Request) {
		var request metricspb.ExportMetricsServiceRequest
		c.receive(w, r, &request, func() {
			for _, of := range request.GetResourceMetrics() {
				c.describe(of.GetResource().GetAttributes())
				for _, scope := range of.GetScopeMetrics() {
					for _, m := range scope.GetMetrics() {
						for _, point := range m.GetSum().GetDataPoints() {
							c.metrics[m.GetName()+" "+textOf(point.GetAttributes())] = float64(point.GetAsInt())
						}
					}
				}
			}
		})
	})
	mux.HandleFunc("POST /v1/traces", func(w http.ResponseWriter, r *http.Request) {
		var request tracepb.ExportTraceServiceRequest
		c.receive(w, r, &request, func() {
			for _, of := range request.GetResourceSpans() {
				c.describe(of.GetResource().GetAttributes())
				for _, scope := range of.GetScopeSpans() {
					for _, span := range scope.GetSpans() {
						c.spans = append(c.spans, span.GetName())
					}
				}
			}
		})
	})
	c.Server = httptest.NewServer(mux)
	t.Cleanup(c.Close)
	return c
}

func (c *collector) receive(w http.ResponseWriter, r *http.Request, into proto.Message, take func()) {
	body, err := io.ReadAll(r.Body)
	if err == nil && r.Header.Get("Content-Type") != "application/x-protobuf" {
		err = errors.New(r.Header.Get("Content-Type"))
	}
	err = errors.Join(err, proto.Unmarshal(body, into))
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.bad = append(c.bad, err)
	} else {
		take()
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.WriteHeader(http.StatusOK)
}

func (c *collector) describe(attributes []*commonpb.KeyValue) {
	for _, a := range attributes {
		c.resource[a.GetKey()] = a.GetValue().GetStringValue()
	}
}

func textOf(attributes []*commonpb.KeyValue) string {
	var all []string
	for _, a := range attributes {
		all = append(all, a.GetKey()+"="+a.GetValue().GetStringValue())
	}
	return strings.Join(all, ",")
}

// tracedMessage commits a message of a sampled trace to the outbox of a new SQLite file, and
// returns the variables of the command for it.
func tracedMessage(t *testing.T) (box *outbox.Outbox, env []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shop.db")
	uri := testserver.RabbitMQ(t)
	declareQueue(t, uri, "orders")
	env = []string{"ONCEMILL_DATABASE=sqlite:" + path, "ONCEMILL_AMQP_URL=" + uri, "ONCEMILL_TOPOLOGY=queue", "ONCEMILL_NAME=worker-7"}
	runner(t, env)(0, "migrate")
	box, err := outbox.New(testserver.OpenSQLite(t, path), outbox.Config{Database: oncemill.Config{Dialect: oncemill.SQLite}, Propagator: propagation.TraceContext{}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, span := sdktrace.NewTracerProvider().Tracer("shop").Start(t.Context(), "order")
	defer span.End()
	m := message.NewMessage("traced", nil)
	m.SetContext(ctx)
	if err := box.RunInTx(ctx, func(_ context.Context, tx *sql.Tx) error { return box.Publisher(tx).Publish("orders", m) }); err != nil {
		t.Fatal(err)
	}
	return box, env
}

// What a worker has measured arrives, also what it measured last: nothing is exported on schedule
// within this test.
func TestRelayCommand_ExportsMetricsAndTracesWhenItStops(t *testing.T) {
	t.Parallel()
	c := newCollector(t)
	box, env := tracedMessage(t)
	env = append(env, "OTEL_EXPORTER_OTLP_ENDPOINT="+c.URL, "OTEL_BSP_SCHEDULE_DELAY=3600000", "OTEL_METRIC_EXPORT_INTERVAL=3600000",
		"OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=test", "OTEL_SERVICE_NAME=shop-relay")
	cmd, output := command(t.Context(), env, "relay")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awaitRelayed(t, box)
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.metrics["oncemill.relay.outcomes outcome=confirmed"]; n != 1 || len(c.bad) > 0 {
		t.Errorf("%v confirmed, %v; metrics: %v; output: %s", n, c.bad, c.metrics, output)
	}
	if len(c.spans) != 1 || c.spans[0] != "send orders" {
		t.Errorf("spans: %v", c.spans)
	}
	for name, want := range map[string]string{"service.name": "shop-relay", "service.instance.id": "worker-7", "deployment.environment.name": "test"} {
		if got := c.resource[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

func declareQueue(t *testing.T, uri, name string) {
	t.Helper()
	conn, err := amqp.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare(name, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
}

func awaitRelayed(t *testing.T, box *outbox.Outbox) {
	t.Helper()
	testserver.Eventually(t, "the message is relayed", func() bool {
		var n int
		err := box.DB().QueryRowContext(t.Context(), "select count(*) from oncemill_outbox").Scan(&n)
		return err == nil && n == 0
	})
}

// A collector that accepts connections and is silent delays the end, and does not prevent it.
func TestRelayCommand_StopsWhileTheCollectorIsSilent(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	box, env := tracedMessage(t)
	// The SDK itself would wait this long.
	env = append(env, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+silent.Addr().String(), "OTEL_EXPORTER_OTLP_TIMEOUT=3600000", "OTEL_METRIC_EXPORT_TIMEOUT=3600000", "OTEL_BSP_EXPORT_TIMEOUT=3600000")
	cmd, output := command(t.Context(), env, "relay")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awaitRelayed(t, box)
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	if !strings.Contains(output.String(), "the last metrics and traces were not exported") {
		t.Errorf("does not report it: %s", output)
	}
}

// What a collector answers fills no log.
func TestRelayCommand_LogsLittleOfWhatTheCollectorAnswers(t *testing.T) {
	t.Parallel()
	rude := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, strings.Repeat("\x1b[31mé", 100_000))
	}))
	defer rude.Close()
	box, env := tracedMessage(t)
	cmd, output := command(t.Context(), append(env, "OTEL_EXPORTER_OTLP_ENDPOINT="+rude.URL, "OTEL_METRIC_EXPORT_INTERVAL=100"), "relay")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awaitRelayed(t, box)
	if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	seen := false
	for line := range strings.Lines(output.String()) {
		seen = seen || strings.Contains(line, "400 Bad Request")
		if len(line) > 2000 || strings.Contains(line, "\x1b") {
			t.Errorf("a line of %d bytes: %.200q", len(line), line)
		}
	}
	if !seen {
		t.Errorf("does not report it: %s", output)
	}
}

func TestTelemetry_EndsInTimeWhateverItsExportersDo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		stop, begin := make(chan struct{}), time.Now()
		tel := &telemetry{ends: []func(context.Context) error{
			func(context.Context) error { <-stop; return nil },
			func(context.Context) error { return errors.New("other") },
		}}
		err := tel.end(t.Context())
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "other") || time.Since(begin) != flushTimeout {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		close(stop)
	})
}

type countedGatherer int

func (g *countedGatherer) Gather() ([]*dto.MetricFamily, error) {
	*g++
	return nil, nil
}

func TestGathered_CollectsOnceForAllWhoAsk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var n countedGatherer
		g := &gathered{from: &n}
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { _, _ = g.Gather() })
		}
		all.Wait()
		time.Sleep(gatheredFor) // of the bubble
		_, _ = g.Gather()
		if n != 2 {
			t.Errorf("collected %d times", n)
		}
	})
}
