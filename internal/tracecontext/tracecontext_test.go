package tracecontext_test

import (
	"maps"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/tracecontext"
)

const (
	sampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	other   = "00-0af7651916cd43dd8448eb211c80319d-b7ad6b7169203332-01"
)

// both is what most services use. Its names come in another order each time.
func both() propagation.TextMapPropagator {
	return propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
}

func TestCarrier_FindsATraceWhateverTheOrderOfTheNames(t *testing.T) {
	t.Parallel()
	for range 50 {
		c := tracecontext.New(both())
		if !c.In(map[string]string{"traceparent": sampled}) || !c.In(map[string]string{"baggage": "a=b"}) {
			t.Fatal("no trace found")
		}
		if c.In(map[string]string{"name": "x"}) || c.In(nil) {
			t.Fatal("a trace found where there is none")
		}
		ctx := trace.ContextWithRemoteSpanContext(t.Context(), c.Of(map[string]string{"traceparent": sampled}))
		for name, given := range map[string]map[string]string{
			"trace":            {"traceparent": other},
			"trace and state":  {"traceparent": other, "tracestate": "a=b"},
			"trace, other too": {"traceparent": other, "baggage": "a=b", "name": "x"},
		} {
			if got := c.Continue(ctx, given); !maps.Equal(got, given) {
				t.Fatalf("%s: became %v", name, got)
			}
		}
		given := map[string]string{"baggage": "a=b"}
		if got := c.Continue(ctx, given); got["traceparent"] != sampled || got["baggage"] != "a=b" || len(given) != 1 {
			t.Fatalf("baggage became %v, given %v", got, given)
		}
	}
}

func TestCarrier_TakesMalformedMetadataAsNone(t *testing.T) {
	t.Parallel()
	c := tracecontext.New(both())
	for _, value := range []string{
		"x", sampled[1:], strings.ToUpper(sampled), "ff" + sampled[2:], sampled + "-more", strings.Repeat("0", 1<<20),
		"00-00000000000000000000000000000000-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
		"\x1b[31m", "00-\x00",
	} {
		if got := c.Of(map[string]string{"traceparent": value, "tracestate": strings.Repeat("a=b,", 1<<18)}); got.IsValid() {
			t.Errorf("%.60q: trace %v", value, got.TraceID())
		}
	}
	if got := c.Of(map[string]string{"traceparent": sampled, "tracestate": strings.Repeat("a=b,", 1<<18)}); !got.IsSampled() || got.TraceState().Len() != 0 {
		t.Errorf("a malformed state: trace %v, %d entries", got.TraceID(), got.TraceState().Len())
	}
}

func TestCarrier_ReplacesAndRemovesATrace(t *testing.T) {
	t.Parallel()
	c := tracecontext.New(propagation.TraceContext{})
	ctx := trace.ContextWithRemoteSpanContext(t.Context(), c.Of(map[string]string{"traceparent": sampled}))
	given := map[string]string{"traceparent": other, "name": "x"}
	if got := c.Replace(ctx, given); got["traceparent"] != sampled || got["name"] != "x" || given["traceparent"] != other {
		t.Errorf("replaced: %v, given %v", got, given)
	}
	if got := c.Without(given); len(got) != 1 || got["name"] != "x" || len(given) != 2 {
		t.Errorf("removed: %v, given %v", got, given)
	}
	full := map[string]string{"traceparent": other, "tracestate": "a=b", "baggage": "tenant=7"}
	if got := tracecontext.New(both()).Without(full); len(got) != 1 || got["baggage"] != "tenant=7" {
		t.Errorf("removed: %v", got)
	}
}

// late is a propagator that has no names until it is set, as OpenTelemetry's global one.
type late struct{ propagation.TextMapPropagator }

func TestCarrier_NoticesAPropagatorThatIsSetLater(t *testing.T) {
	t.Parallel()
	p := &late{propagation.NewCompositeTextMapPropagator()}
	c := tracecontext.New(p)
	metadata := map[string]string{"traceparent": sampled}
	if c.In(metadata) {
		t.Error("found without names")
	}
	p.TextMapPropagator = propagation.TraceContext{}
	if !c.In(metadata) {
		t.Error("not found once it is set")
	}
}

func TestCarrier_CostsOneLookWithoutATrace(t *testing.T) {
	metadata := map[string]string{"name": "x", "oncemill_key": "1"}
	for name, p := range map[string]propagation.TextMapPropagator{
		"off": propagation.NewCompositeTextMapPropagator(), "on": both(), "trace context": propagation.TraceContext{},
	} {
		c := tracecontext.New(p)
		c.In(metadata)
		if n := testing.AllocsPerRun(100, func() { c.In(metadata) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkCarrier(b *testing.B) {
	c := tracecontext.New(both())
	unsampled := sampled[:len(sampled)-1] + "0"
	for name, metadata := range map[string]map[string]string{
		"none": {"name": "x"}, "unsampled": {"traceparent": unsampled}, "sampled": {"traceparent": sampled},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if c.In(metadata) {
					c.Extract(b.Context(), metadata)
				}
			}
		})
	}
}
