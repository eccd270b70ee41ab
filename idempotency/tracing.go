package idempotency

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// state is how a request or command with a key ended, for metrics and spans.
type state string

const (
	stateExecuted    state = "executed" // and its answer is stored
	stateReplayed    state = "replayed"
	stateConflict    state = "conflict" // another copy is running
	stateMismatch    state = "mismatch" // the key came with another request
	stateReleased    state = "released" // it ran without an effect, and may run again
	stateUnknown     state = "unknown"  // an earlier run, or this one, has an unknown outcome
	stateNotStored   state = "not_stored"
	stateExpired     state = "expired"
	stateTooMany     state = "too_many_keys"
	stateTimedOut    state = "timed_out"
	stateContended   state = "contended"
	stateUncommitted state = "not_committed"
	stateUncertain   state = "commit_unknown"
	stateLost        state = "lost"
	stateStoreFailed state = "store_unavailable"
	stateUnprotected state = "unprotected" // Config.Failures.FailOpen
	stateFailed      state = "failed"      // an error before the run
)

// states are those of decisions other than to run.
var decisionStates = map[decision]state{
	decisionReused: stateMismatch, decisionInProgress: stateConflict, decisionUnknown: stateUnknown, decisionNotStored: stateNotStored,
	decisionExpired: stateExpired, decisionTooMany: stateTooMany, decisionOverQuota: stateTooMany, decisionRateLimited: stateTooMany, decisionRefused: stateFailed, decisionTooLate: stateTimedOut, decisionStoreFailed: stateStoreFailed,
}

var outcomeStates = map[outcome]state{
	outcomeStored: stateExecuted, outcomeReleased: stateReleased, outcomeTimedOut: stateTimedOut, outcomeContended: stateContended,
	outcomeUncommitted: stateUncommitted, outcomeUnreachable: stateStoreFailed, outcomeUnknown: stateUnknown, outcomeUnstored: stateNotStored,
	outcomeLostClaim: stateLost, outcomeUncertain: stateUncertain,
}

// faulty reports whether the service, and not the caller, is the cause.
func (s state) faulty() bool {
	switch s {
	case stateUnknown, stateNotStored, stateTimedOut, stateContended, stateUncommitted, stateUncertain, stateLost, stateStoreFailed, stateUnprotected, stateFailed:
		return true
	}
	return false
}

// beginSpan starts the span of a request or command with a key, and returns its context. A
// span in ctx is the parent; if its trace is not sampled, there is no span.
func (in *intent) beginSpan(ctx context.Context, received time.Time) context.Context {
	in.received = received
	if parent := trace.SpanContextFromContext(ctx); !parent.IsValid() || parent.IsSampled() {
		ctx, in.span = in.tracer.Start(ctx, "idempotency "+in.claim.Endpoint, trace.WithTimestamp(received), trace.WithAttributes(
			attribute.String("oncemill.idempotency.key_hash", in.claim.ID.String()),
			attribute.String("oncemill.idempotency.endpoint", in.claim.Endpoint),
		))
	}
	if of := trace.SpanContextFromContext(ctx); of.IsValid() {
		in.claim.TraceID = of.TraceID().String()
	}
	return ctx
}

// endSpan ends the span, and records how long the request or command took.
func (in *intent) endSpan(ctx context.Context) {
	if in.telemetry.duration.Enabled(ctx) {
		in.telemetry.duration.Record(ctx, time.Since(in.received).Seconds(), metric.WithAttributes(
			attribute.String("endpoint", in.telemetry.endpoints.Of(in.claim.Endpoint)), attribute.String("state", string(in.state))))
	}
	if in.span == nil {
		return
	}
	in.span.SetAttributes(attribute.String("oncemill.idempotency.state", string(in.state)))
	if in.state.faulty() {
		in.span.SetAttributes(attribute.String("error.type", string(in.state)))
		in.span.SetStatus(codes.Error, string(in.state))
	}
	in.span.End()
}

// sawReplay notes that the answer is that of an earlier run, and the trace of that run.
func (in *intent) sawReplay(record Record) {
	in.state = stateReplayed
	if in.span != nil && record.TraceID != "" {
		in.span.SetAttributes(attribute.String("oncemill.idempotency.first_trace_id", printable(record.TraceID, maxKey)))
	}
}
