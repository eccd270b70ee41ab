package inbox_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/outbox"
)

// spans records what an inbox traces.
type spans struct {
	*tracetest.SpanRecorder
	provider   *sdktrace.TracerProvider
	propagator propagation.TextMapPropagator
}

func newSpans() *spans {
	recorder := tracetest.NewSpanRecorder()
	return &spans{
		recorder, sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)),
		propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
}

func (s *spans) inbox(t *testing.T, p *testDB, change func(*inbox.Config)) *inbox.Inbox {
	t.Helper()
	box, err := outbox.New(p.pool(t), outbox.Config{Database: p.cfg, Propagator: s.propagator})
	if err != nil {
		t.Fatal(err)
	}
	return p.inbox(t, func(cfg *inbox.Config) {
		cfg.Outbox, cfg.TracerProvider, cfg.Propagator = box, s.provider, s.propagator
		if change != nil {
			change(cfg)
		}
	})
}

// named returns the ended spans of a name.
func (s *spans) named(name string) (found []sdktrace.ReadOnlySpan) {
	for _, span := range s.Ended() {
		if span.Name() == name {
			found = append(found, span)
		}
	}
	return found
}

func attrOf(span sdktrace.ReadOnlySpan, name string) string {
	for _, attr := range span.Attributes() {
		if string(attr.Key) == name {
			return attr.Value.String()
		}
	}
	return ""
}

// traceparent returns that of the nth trace of a test.
func traceparent(n int, flags string) string { return fmt.Sprintf("00-%032x-%016x-%s", n, n, flags) }

// sent returns a message for the topic orders with a trace in its metadata.
func sent(t *testing.T, id, traceparent string) *message.Message {
	t.Helper()
	msg := routed(t, id, "results")
	msg.Metadata.Set("traceparent", traceparent)
	return msg
}

// traceparents returns those of what is in the outbox.
func (p *testDB) traceparents(t *testing.T) (all []string) {
	t.Helper()
	rows, err := p.db.QueryContext(t.Context(), `select metadata from `+database.Of(p.box.Config().Database).Table("outbox")+` order by message_id`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var metadata []byte
		if err := rows.Scan(&metadata); err != nil {
			t.Fatal(err)
		}
		_, after, _ := strings.Cut(string(metadata), `"traceparent":"`)
		traceparent, _, _ := strings.Cut(after, `"`)
		all = append(all, traceparent)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestInbox_ContinuesTheTraceOfAMessage(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, nil)
		var within trace.SpanContext
		err := deliverMessage(t, in, sent(t, "a", traceparent(1, "01")), func(msg *message.Message) ([]*message.Message, error) {
			within = trace.SpanContextFromContext(msg.Context())
			passedOn := msg.Copy() // with the metadata that it came with
			passedOn.UUID = "passed on"
			return []*message.Message{message.NewMessage("new", nil), passedOn}, addEffect(msg)
		})
		expectNoError(t, err)
		got := s.named("process orders")
		if len(got) != 1 {
			t.Fatalf("%d spans", len(got))
		}
		span := got[0]
		if span.Parent().TraceID().String() != fmt.Sprintf("%032x", 1) || span.Parent().SpanID().String() != fmt.Sprintf("%016x", 1) {
			t.Errorf("parent %v", span.Parent())
		}
		if span.SpanContext().SpanID() != within.SpanID() || span.SpanKind() != trace.SpanKindConsumer || span.Status().Code != codes.Unset {
			t.Errorf("the handler has %v; kind %v, status %v", within.SpanID(), span.SpanKind(), span.Status())
		}
		for name, want := range map[string]string{
			"messaging.operation.type": "process", "messaging.destination.name": "orders", "messaging.consumer.group.name": "stock",
			"messaging.message.id": "a", "oncemill.outcome": "handled",
		} {
			if attrOf(span, name) != want {
				t.Errorf("%s is %q", name, attrOf(span, name))
			}
		}
		want := fmt.Sprintf("00-%s-%s-01", within.TraceID(), within.SpanID())
		if produced := p.traceparents(t); !slices.Equal(produced, []string{want, want}) {
			t.Errorf("produced with %q, want %q", produced, want)
		}
	})
}

func TestInbox_PutsASpanOfTheCallerAboveTheTraceOfTheMessage(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, nil)
		msg := sent(t, "a", traceparent(1, "01"))
		ctx, router := s.provider.Tracer("router").Start(msg.Context(), "router")
		msg.SetContext(ctx)
		expectNoError(t, deliverMessage(t, in, msg, effect))
		router.End()
		span := s.named("process orders")[0]
		if span.Parent().SpanID() != router.SpanContext().SpanID() {
			t.Errorf("parent %v", span.Parent())
		}
		if links := span.Links(); len(links) != 1 || links[0].SpanContext.SpanID().String() != fmt.Sprintf("%016x", 1) {
			t.Errorf("links %v", links)
		}
	})
}

// Whatever the metadata holds, the message is handled.
func TestInbox_HandlesMessagesWithoutAUsableTrace(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, nil)
		hostile := []string{"", "x", traceparent(0, "01"), traceparent(1, "01") + "-x", strings.Repeat("0", 1<<20), "\x1b[31m\x00"}
		for i, value := range hostile {
			msg := sent(t, fmt.Sprint(i), value)
			msg.Metadata.Set("tracestate", strings.Repeat("a=b,", 1<<15))
			msg.Metadata.Set("baggage", strings.Repeat("a=b,", 1<<15))
			expectNoError(t, deliverMessage(t, in, msg, effect))
		}
		p.expect(t, len(hostile), len(hostile), 0)
		if got := s.Ended(); len(got) != 0 {
			t.Errorf("%d spans", len(got))
		}
	})
}

// An unsampled trace makes no span, but nothing below it may begin a new one.
func TestInbox_PassesAnUnsampledTraceOn(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, nil)
		expectNoError(t, deliverMessage(t, in, sent(t, "a", traceparent(1, "00")), func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage("new", nil)}, addEffect(msg)
		}))
		if got := p.traceparents(t); !slices.Equal(got, []string{traceparent(1, "00")}) || len(s.Ended()) != 0 {
			t.Errorf("produced with %q, %d spans", got, len(s.Ended()))
		}
	})
}

func TestInbox_MarksSpansOfFailures(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		expectNoError(t, migrateRelay(t, p))
		letters, err := dlq.New(p.db, dlq.Config{Database: p.cfg})
		if err != nil {
			t.Fatal(err)
		}
		s := newSpans()
		in := s.inbox(t, p, func(cfg *inbox.Config) { cfg.DeadLetters = letters })
		fail := func(err error) message.HandlerFunc {
			return func(*message.Message) ([]*message.Message, error) { return nil, err }
		}
		expectError(t, deliverMessage(t, in, sent(t, "again", traceparent(1, "01")), fail(errUndo)), errUndo)
		expectNoError(t, deliverMessage(t, in, sent(t, "dead", traceparent(2, "01")), fail(inbox.Permanent(errUndo))))
		expectNoError(t, deliverMessage(t, in, sent(t, "fine", traceparent(3, "01")), effect))
		expectNoError(t, deliverMessage(t, in, sent(t, "fine", traceparent(4, "01")), effect))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = deliverMessage(t, in, sent(t, "gone", traceparent(5, "01")), func(*message.Message) ([]*message.Message, error) { runtime.Goexit(); return nil, nil })
		}()
		<-ended
		var got []string
		for _, span := range s.named("process orders") {
			got = append(got, strings.TrimSpace(fmt.Sprintln(attrOf(span, "messaging.message.id"), attrOf(span, "oncemill.outcome"), attrOf(span, "error.type"), span.Status().Code)))
		}
		want := []string{"again failed handler Error", "dead dead_letter handler Error", "fine handled  Unset", "fine duplicate  Unset", "gone failed handler Error"}
		if !slices.Equal(got, want) {
			t.Errorf("got %q", got)
		}
	})
}

func TestBatch_HasOneSpanWithLinksToItsMessages(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, func(cfg *inbox.Config) { cfg.Group = inbox.Group{Size: 4, Wait: time.Second} })
		var within trace.SpanContext
		handle := in.Batch(func(ctx context.Context, msgs []*message.Message) error {
			within = trace.SpanContextFromContext(ctx)
			for _, msg := range msgs {
				if err := addEffect(msg); err != nil {
					return err
				}
			}
			return nil
		})
		var msgs []*message.Message
		for i := range 4 {
			msgs = append(msgs, sent(t, fmt.Sprint(i), traceparent(i+1, "01")))
		}
		msgs[3].Metadata.Set("traceparent", "none")
		expectNoErrors(t, deliverTo(handle, msgs...))
		p.expect(t, 4, 4, 0)
		of := map[trace.SpanID]bool{} // the deliveries
		var group sdktrace.ReadOnlySpan
		for _, span := range s.named("process orders") {
			if attrOf(span, "messaging.batch.message_count") != "" {
				group = span
				continue
			}
			of[span.SpanContext().SpanID()] = true
		}
		if group == nil || len(of) != 3 {
			t.Fatalf("%d spans of deliveries, group %v", len(of), group)
		}
		for _, link := range group.Links() {
			if !of[link.SpanContext.SpanID()] {
				t.Errorf("link to %v", link.SpanContext.SpanID())
			}
		}
		if len(group.Links()) != 3 || !of[group.Parent().SpanID()] || group.SpanContext().SpanID() != within.SpanID() || attrOf(group, "messaging.batch.message_count") != "4" {
			t.Errorf("links %d, parent %v, count %s", len(group.Links()), group.Parent().SpanID(), attrOf(group, "messaging.batch.message_count"))
		}
	})
}

// points returns the counts and sums of a histogram, by outcome and error.type.
func points(t *testing.T, reader *sdk.ManualReader, name string) map[string]metricdata.HistogramDataPoint[float64] {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]metricdata.HistogramDataPoint[float64]{}
	for _, scope := range all.ScopeMetrics {
		for _, metric := range scope.Metrics {
			data, ok := metric.Data.(metricdata.Histogram[float64])
			if metric.Name != name || !ok {
				continue
			}
			for _, p := range data.DataPoints {
				ended, _ := p.Attributes.Value(attribute.Key("outcome"))
				kind, _ := p.Attributes.Value(attribute.Key("error.type"))
				found[strings.TrimSpace(ended.AsString()+" "+kind.AsString())] = p
			}
		}
	}
	return found
}

func TestInbox_MeasuresDeliveriesAndTheWayFromTheCommit(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		reader := sdk.NewManualReader()
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.MeterProvider = sdk.NewMeterProvider(sdk.WithReader(reader))
		})
		at := func(id string, ago time.Duration) *message.Message {
			msg := routed(t, id, "results")
			msg.Metadata.Set(outbox.CreatedAtMetadata, time.Now().Add(-ago).UTC().Format(time.RFC3339Nano))
			return msg
		}
		expectNoError(t, deliverMessage(t, in, at("a", time.Minute), effect))
		expectNoError(t, deliverMessage(t, in, at("a", time.Minute), effect))
		expectNoError(t, deliverMessage(t, in, at("ahead", -10*time.Second), effect)) // of a clock
		expectNoError(t, deliverMessage(t, in, routed(t, "unknown", "results"), effect))
		forged := routed(t, "forged", "results")
		forged.Metadata.Set(outbox.CreatedAtMetadata, "yesterday")
		expectNoError(t, deliverMessage(t, in, forged, effect))
		expectError(t, deliverMessage(t, in, at("b", time.Minute), func(*message.Message) ([]*message.Message, error) { return nil, errUndo }), errUndo)

		got := points(t, reader, "messaging.process.duration")
		if len(got) != 3 || got["handled"].Count != 4 || got["duplicate"].Count != 1 || got["failed handler"].Count != 1 {
			t.Errorf("deliveries: %v", got)
		}
		way := points(t, reader, "oncemill.inbox.commit_to_effect")
		if p := way[""]; len(way) != 1 || p.Count != 2 || p.Sum < 60 || p.Sum > 600 {
			t.Errorf("from the commit: %v", way)
		}
	})
}

// Anybody who can write to the broker can choose the time of the insert.
func TestInbox_MeasuresNoForgedTimes(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		reader := sdk.NewManualReader()
		in := p.inbox(t, func(cfg *inbox.Config) {
			cfg.MeterProvider = sdk.NewMeterProvider(sdk.WithReader(reader))
		})
		for i, forged := range []string{
			"0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "-1", "1e308", "NaN", "1970-01-01T00:00:00Z", strings.Repeat("9", 1<<20),
			time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano), "2026-01-01T00:00:00." + strings.Repeat("0", 1<<20) + "Z",
		} {
			msg := routed(t, fmt.Sprint(i), "results")
			msg.Metadata.Set(outbox.CreatedAtMetadata, forged)
			expectNoError(t, deliverMessage(t, in, msg, effect))
		}
		if way := points(t, reader, "oncemill.inbox.commit_to_effect"); len(way) != 0 {
			t.Errorf("measured %v", way)
		}
		// A consumer and a relay of an older build have passed on the time of the incoming
		// message; the subscriber knows when this one was made.
		passed := routed(t, "passed on", "results")
		passed.Metadata.Set(outbox.CreatedAtMetadata, time.Now().Add(-time.Hour).UTC().Format(time.RFC3339Nano))
		passed.SetContext(inbox.ContextWithDelivery(passed.Context(), delivery{createdAt: time.Now().Add(-time.Minute).Truncate(time.Second)}))
		expectNoError(t, deliverMessage(t, in, passed, effect))
		exact := routed(t, "exact", "results")
		at := time.Now().Add(-30 * time.Second).Truncate(time.Second).Add(900 * time.Millisecond)
		exact.Metadata.Set(outbox.CreatedAtMetadata, at.UTC().Format(time.RFC3339Nano))
		exact.SetContext(inbox.ContextWithDelivery(exact.Context(), delivery{createdAt: at.Truncate(time.Second)}))
		before := time.Since(at)
		expectNoError(t, deliverMessage(t, in, exact, effect))
		after := time.Since(at)
		way := points(t, reader, "oncemill.inbox.commit_to_effect")[""]
		if way.Count != 2 || way.Sum < 90-1 || way.Sum > 1800 {
			t.Errorf("measured %v", way)
		}
		if least, _ := way.Min.Value(); least < before.Seconds() || least > after.Seconds() {
			t.Errorf("measured %v s at least, want %v to %v", least, before, after)
		}
	})
}

// Spans of deliveries and of groups end however the handlers do.
func TestGroup_EndsEverySpan(t *testing.T) {
	onADB(t, func(t *testing.T, p *testDB) {
		s := newSpans()
		in := s.inbox(t, p, func(cfg *inbox.Config) {
			cfg.Group, cfg.Timeout = inbox.Group{Size: 4, Wait: time.Second}, 2*time.Second
		})
		handle := in.GroupMiddleware(func(msg *message.Message) ([]*message.Message, error) {
			kind, _, _ := strings.Cut(msg.UUID, " ")
			switch kind {
			case "fails":
				return nil, errUndo
			case "panics":
				panic("no")
			case "ends":
				runtime.Goexit()
			}
			return nil, addEffect(msg)
		})
		var group sync.WaitGroup
		for i := range 16 {
			group.Go(func() {
				_, _ = handle(sent(t, fmt.Sprint([]string{"fine", "fails", "panics", "ends"}[i%4], " ", i), traceparent(i+1, "01")))
			})
		}
		group.Wait()
		ended := map[trace.SpanID]int{}
		for _, span := range s.Ended() {
			ended[span.SpanContext().SpanID()]++
		}
		begun := s.Started()
		for _, span := range begun {
			if n := ended[span.SpanContext().SpanID()]; n != 1 {
				t.Errorf("span %q of %s ended %d times", span.Name(), attrOf(span, "messaging.message.id"), n)
			}
		}
		if len(begun) <= 16 {
			t.Errorf("%d spans: no group", len(begun))
		}
	})
}
