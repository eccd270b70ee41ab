package e2e

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
	inboxrabbitmq "github.com/oncemill/oncemill/inbox/rabbitmq"
	"github.com/oncemill/oncemill/internal/testserver"
	"github.com/oncemill/oncemill/mill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay/rabbitmq"
)

// hopEnv holds the hopSpec of a process that is a service.
const hopEnv = "ONCEMILL_TEST_E2E_HOP"

// hopSpec is a service with tables of its own. It consumes a topic, or serves requests, and
// produces a topic, or nothing.
type hopSpec struct {
	Name, Consumes, Produces string

	DSN      string
	Database oncemill.Config
	AMQP     string
}

// span is a line that a service prints for each span that has ended.
type span struct {
	Service, Name, Kind, Trace, ID, Parent string
}

func (s hopSpec) run(ctx context.Context) (err error) {
	db, err := sql.Open(testserver.DriverName(), s.DSN)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.SetMaxIdleConns(8)
	out := &lines{service: s.Name}
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(out), sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.NeverSample())))
	cfg := mill.Config{
		Database: s.Database, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		TracerProvider: provider, Propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
	if s.Produces != "" {
		cfg.Outbox = &outbox.Config{}
		if cfg.Sink, err = rabbitmq.New(amqp.NewDurablePubSubConfig(s.AMQP, nil), rabbitmq.Config{Logger: cfg.Logger}); err != nil {
			return err
		}
	}
	if s.Consumes != "" {
		cfg.Consumers = []mill.Consumer{{
			Name: s.Name, Topic: s.Consumes, Produces: s.Produces, Handler: s.handle,
			Subscriber: inboxrabbitmq.Queue(s.AMQP, s.Name, inboxrabbitmq.Config{Logger: cfg.Logger}),
		}}
	} else {
		cfg.Idempotency = &idempotency.Config{Scope: idempotency.SingleTenant()}
	}
	m, err := mill.New(db, cfg)
	if err != nil {
		return err
	}
	ready := func(ctx context.Context) error {
		testserver.Poll(ctx, func() bool { return m.Ready() == nil })
		out.print("ready", s.Name)
		return nil
	}
	if s.Consumes != "" {
		return m.Run(ctx, ready)
	}
	return m.Run(ctx, ready, func(ctx context.Context) error {
		return serveOrders(ctx, m, provider.Tracer("server"), cfg.Propagator, out, s.Produces)
	})
}

// handle produces a message, unless the service is the last one.
func (s hopSpec) handle(*message.Message) ([]*message.Message, error) {
	if s.Produces == "" {
		return nil, nil
	}
	return []*message.Message{message.NewMessage(watermill.NewUUID(), nil)}, nil
}

// serveOrders serves requests, as behind an instrumented server, until ctx ends.
func serveOrders(ctx context.Context, m *mill.Mill, tracer trace.Tracer, propagator propagation.TextMapPropagator, out *lines, topic string) error {
	orders := m.Idempotency().TxMiddleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := idempotency.TxFromContext(r.Context())
		if err := m.Outbox().Publish(r.Context(), tx, topic, message.NewMessage(watermill.NewUUID(), nil)); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // only the test can reach it
		ctx, span := tracer.Start(propagator.Extract(r.Context(), propagation.HeaderCarrier(r.Header)), "POST /orders", trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		orders.ServeHTTP(w, r.WithContext(ctx))
	})}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	out.print("listening", listener.Addr().String())
	context.AfterFunc(ctx, func() { _ = server.Close() })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// lines prints spans, and is safe for concurrent use.
type lines struct {
	service string
	mu      sync.Mutex
}

func (l *lines) print(kind string, value any) {
	text, _ := json.Marshal(value) // strings
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Printf("%s %s\n", kind, text)
}

func (l *lines) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	for _, s := range spans {
		l.print("span", span{
			l.service, s.Name(), s.SpanKind().String(), s.SpanContext().TraceID().String(), s.SpanContext().SpanID().String(), s.Parent().SpanID().String(),
		})
	}
	return nil
}

func (l *lines) Shutdown(context.Context) error { return nil }

func hopMain(text string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var spec hopSpec
	if err := errors.Join(json.Unmarshal([]byte(text), &spec), spec.run(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// collected is what services have printed.
type collected struct {
	mu      sync.Mutex
	address string
	ready   int // services
	spans   []span
}

// read takes the lines of a service until it ends.
func (c *collected) read(t *testing.T, out io.Reader) {
	scanner := bufio.NewScanner(out)
	for scanner.Scan() {
		kind, text, _ := strings.Cut(scanner.Text(), " ")
		c.mu.Lock()
		var err error
		switch kind {
		case "listening":
			err = json.Unmarshal([]byte(text), &c.address)
		case "ready":
			c.ready++
		case "span":
			var s span
			err = json.Unmarshal([]byte(text), &s)
			c.spans = append(c.spans, s)
		}
		c.mu.Unlock()
		if err != nil {
			t.Errorf("%s: %v", scanner.Text(), err)
		}
	}
}

// chain returns the spans of a trace from the one whose parent is root, each below the one
// before.
func (c *collected) chain(trace, root string) (chain []span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for parent := root; ; {
		next := -1
		for i, s := range c.spans {
			if s.Trace == trace && s.Parent == parent {
				next = i
			}
		}
		if next < 0 {
			return chain
		}
		chain = append(chain, c.spans[next])
		parent = c.spans[next].ID
	}
}

// listening returns the address of the shop, and "" until every service is ready: what is sent
// to a topic that has no queue yet is refused and sent again, a span each time.
func (c *collected) listening(services int) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ready < services {
		return ""
	}
	return c.address
}

// A request is one trace over three services, each a process with tables of its own: each
// span is below the one before it.
func TestTrace_GoesThroughThreeServices(t *testing.T) {
	t.Parallel()
	broker := testserver.RabbitMQ(t)
	all := &collected{}
	services := []hopSpec{
		{Name: "mail", Consumes: "reservations"},
		{Name: "stock", Consumes: "orders", Produces: "reservations"},
		{Name: "shop", Produces: "orders"},
	}
	for _, spec := range services {
		pg := testserver.Postgres(t)
		spec.DSN, spec.Database, spec.AMQP = pg.URL(t), pg.Config, broker
		p := startProcessWith(t, hopEnv, spec, func(cmd *exec.Cmd) error {
			out, err := cmd.StdoutPipe()
			if err == nil {
				go all.read(t, out)
			}
			return err
		})
		defer p.end()
	}
	var address string
	eventually(t, "the shop listens, and all are ready", func() bool {
		address = all.listening(len(services))
		return address != ""
	})

	const traceID, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/orders", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Idempotency-Key", "one")
	r.Header.Set("traceparent", "00-"+traceID+"-"+client+"-01")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Body.Close(); err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", res.Status, err)
	}

	want := []span{
		{Service: "shop", Name: "POST /orders", Kind: "server"},
		{Service: "shop", Name: "idempotency POST unmatched", Kind: "internal"},
		{Service: "shop", Name: "send orders", Kind: "producer"},
		{Service: "stock", Name: "process orders", Kind: "consumer"},
		{Service: "stock", Name: "send reservations", Kind: "producer"},
		{Service: "mail", Name: "process reservations", Kind: "consumer"},
	}
	eventually(t, "the last service has handled its message", func() bool { return len(all.chain(traceID, client)) == len(want) })
	for i, got := range all.chain(traceID, client) {
		if w := want[i]; got.Service != w.Service || got.Name != w.Name || got.Kind != w.Kind {
			t.Errorf("span %d: got %s %q (%s), want %s %q (%s)", i, got.Service, got.Name, got.Kind, w.Service, w.Name, w.Kind)
		}
	}
	all.mu.Lock()
	defer all.mu.Unlock()
	if n := len(all.spans); n != len(want) {
		t.Errorf("%d spans, want %d", n, len(want))
	}
}
