// Package tracecontext carries the trace of a message in its metadata.
package tracecontext

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Carrier reads and writes the trace of messages with a propagator. It is safe for
// concurrent use.
type Carrier struct {
	propagator propagation.TextMapPropagator
	fields     atomic.Pointer[fields]
}

// fields are the names that the propagator writes. They are in no useful order: a composite
// propagator returns them in another one each time.
type fields struct {
	all   []string
	trace []string // those that make a trace
}

// companions are written beside a trace, and are none.
var companions = []string{"tracestate", "baggage"}

// New returns a carrier.
func New(propagator propagation.TextMapPropagator) *Carrier { return &Carrier{propagator: propagator} }

// names returns the names that the propagator writes. The global propagator has none until
// the service sets it, perhaps after New, so an empty answer is not kept.
func (c *Carrier) names() *fields {
	if known := c.fields.Load(); known != nil {
		return known
	}
	all := c.propagator.Fields()
	if len(all) == 0 {
		return &none
	}
	known := &fields{all: all}
	for _, name := range all {
		if !slices.Contains(companions, name) {
			known.trace = append(known.trace, name)
		}
	}
	c.fields.Store(known)
	return known
}

var none fields

// In reports whether metadata may have a trace. It allocates nothing.
func (c *Carrier) In(metadata map[string]string) bool {
	return len(metadata) > 0 && has(metadata, c.names().all)
}

func has(metadata map[string]string, names []string) bool {
	for _, name := range names {
		if metadata[name] != "" {
			return true
		}
	}
	return false
}

// Extract returns ctx with the trace of metadata. Malformed metadata has none: then ctx is
// returned.
func (c *Carrier) Extract(ctx context.Context, metadata map[string]string) context.Context {
	return c.propagator.Extract(ctx, propagation.MapCarrier(metadata))
}

// Of returns the trace of metadata, which is invalid if there is none.
func (c *Carrier) Of(metadata map[string]string) trace.SpanContext {
	if !c.In(metadata) {
		return trace.SpanContext{}
	}
	return trace.SpanContextFromContext(c.Extract(context.Background(), metadata)) //nolint:forbidigo // an empty one, to see what the metadata adds
}

// Continue returns metadata with the trace of ctx, unless it has a trace already. It does not
// change metadata.
func (c *Carrier) Continue(ctx context.Context, metadata map[string]string) map[string]string {
	names := c.names()
	if len(names.all) == 0 || has(metadata, names.trace) {
		return metadata
	}
	return c.with(ctx, metadata, false)
}

// Replace returns metadata with the trace of ctx instead of another. It does not change
// metadata.
func (c *Carrier) Replace(ctx context.Context, metadata map[string]string) map[string]string {
	return c.with(ctx, metadata, true)
}

func (c *Carrier) with(ctx context.Context, metadata map[string]string, replace bool) map[string]string {
	own := propagation.MapCarrier{}
	c.propagator.Inject(ctx, own)
	if len(own) == 0 {
		return metadata
	}
	out := make(map[string]string, len(metadata)+len(own))
	maps.Copy(out, metadata)
	delete(out, "tracestate") // that of another trace, or of none
	for name, value := range own {
		if replace || out[name] == "" {
			out[name] = value
		}
	}
	return out
}

// Without returns metadata without its trace. Baggage stays. It does not change metadata.
func (c *Carrier) Without(metadata map[string]string) map[string]string {
	out := maps.Clone(metadata)
	for _, name := range c.names().trace {
		delete(out, name)
	}
	delete(out, "tracestate")
	return out
}
