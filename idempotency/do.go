package idempotency

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/oncemill/oncemill/internal/txcontext"
)

// Command is an operation to run once.
type Command struct {
	Scope   Scope  // Route is not needed
	Name    string // of the operation, for example "close-month"
	Key     string // unique to this run of it: of a scheduled job, the time it is due
	Payload any    // a []byte, or what encoding/json encodes: compared, not stored
}

// Result is what a command returned, now or in an earlier run.
type Result[T any] struct {
	Value    T
	Replayed bool // fn did not run: an earlier run of the command returned Value
}

// Do runs fn once for each key, and returns its result, as encoded by encoding/json.
//
// With a [SQLStore], fn runs in a transaction that it gets from its context with
// [TxFromContext]. Its writes, the messages it publishes to the outbox, and the result
// commit together. An error, a panic, or a return after Config.Timeout rolls back, and the
// key may run again. fn may run several times, after serialization failures, so it must
// have no other effects. Do cannot be called in another transaction: see
// [ErrInTransaction].
//
// With another store, fn runs as in [Engine.Middleware]: its result is stored however late
// it arrives. After an error or a panic the outcome is unknown, unless fn has called
// [NoEffect] before. The error then wraps both fn's error and [ErrOutcomeUnknown].
//
// A panic becomes a [*oncemill.PanicError]. The other errors: [*KeyError],
// [ErrInTransaction], [ErrInProgress], [ErrKeyReused], [ErrKeyExpired], [ErrNotStored],
// [ErrOutcomeUnknown], [ErrCommitUnknown], [ErrTooManyOutstanding], [ErrContended],
// [ErrStaleOwner] (another owner was faster: call again), context.DeadlineExceeded, and
// those of the store.
//
// Until fn begins, the end of ctx ends Do. fn's context ends at the deadline of ctx or
// after Config.Timeout, whichever is first. It does not end when ctx is canceled: a caller
// that goes away must not make an outcome unknown. Do always waits for fn.
func Do[T any](ctx context.Context, e *Engine, cmd Command, fn func(ctx context.Context) (T, error)) (Result[T], error) {
	var result Result[T]
	encoded, replayed, err := e.do(ctx, cmd, false, func(ctx context.Context) ([]byte, error) {
		value, err := fn(ctx)
		if err != nil {
			return nil, err
		}
		encoded, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("encode result: %w", err)
		}
		return encoded, nil
	})
	if err != nil {
		return result, err
	}
	result.Replayed = replayed
	if err := json.Unmarshal(encoded, &result.Value); err != nil {
		return result, fmt.Errorf("%w: %w", ErrDecode, err)
	}
	return result, nil
}

// command is one call of Do.
type command struct {
	intent
	fn    func(context.Context) ([]byte, error)
	whole bool // a result that is too large to be stored is an error
}

func (e *Engine) do(ctx context.Context, cmd Command, whole bool, fn func(context.Context) ([]byte, error)) (result []byte, replayed bool, err error) {
	if cmd.Key == "" || len(cmd.Key) > maxKey {
		return nil, false, &KeyError{Problem: "must have 1 to 255 bytes"}
	}
	payload, ok := cmd.Payload.([]byte)
	if !ok {
		if payload, err = json.Marshal(cmd.Payload); err != nil {
			return nil, false, fmt.Errorf("encode payload: %w", err)
		}
	}
	_, transactional := e.store.(*SQLStore)
	if transactional && txcontext.From(ctx) != nil {
		return nil, false, ErrInTransaction
	}
	c := &command{intent: e.newIntent(transactional), fn: fn, whole: whole}
	c.claim.ID = hashID(e.hash, "oncemill command key", cmd.Scope.Tenant, cmd.Scope.Principal, cmd.Name, cmd.Key)
	c.claim.Caller = hashCaller(e.hash, cmd.Scope)
	c.claim.Fingerprint = newFingerprint(e.hash, []byte("command"), []byte(cmd.Name), payload)
	c.claim.Endpoint = printable(commandEndpoint+cmd.Name, maxKey)
	c.scope, c.unlimited = cmd.Scope, whole
	if e.cfg.Telemetry.TenantAttribute {
		c.tenant = cmd.Scope.Tenant
	}
	ctx = c.beginSpan(ctx, time.Now())
	defer c.endSpan(ctx)
	c.count(ctx, e.telemetry.received, 0)
	record, v, err := c.decide(ctx)
	x := &execution{&c.intent, c}
	if limit, ok := ctx.Deadline(); ok && limit.Before(c.end) {
		c.end = limit
		if limit.Before(c.deadline) {
			c.deadline = limit
		}
	}
	switch v {
	case decisionReplay:
		if result, err = c.open(ctx, record); err == nil {
			c.sawReplay(record)
			c.count(ctx, e.telemetry.replayed, 0)
		}
		return result, true, err
	case decisionRun:
		result, err = c.result(e.runner.run(ctx, x))
	case decisionRecover:
		result, err = c.result(e.runner.recover(ctx, x, record))
	default:
		err = c.refused(ctx, v, err)
	}
	if errors.Is(err, ErrOutcomeUnknown) {
		c.count(ctx, e.telemetry.unknown, 0)
	}
	return result, false, err
}

func (c *command) start(ctx context.Context, tx *sqlTx) *attempt {
	a, ctx := c.newAttempt(ctx, tx)
	a.begin(ctx, func() { a.result, a.err = c.fn(ctx) })
	return a
}

func (*command) expire(*attempt) {}

func (*command) report(a *attempt) report {
	if a.panicked == nil && a.err == nil {
		return reportSucceeded
	}
	return reportFailed
}

func (c *command) completion(a *attempt) (Completion, error) {
	done := Completion{State: StateCompleted, Retention: c.cfg.retention(nil, 0), Refuse: c.cfg.Expiry.RefuseFor}
	most := c.cfg.Responses.MaxSize
	if c.whole {
		most = mostResponse
	}
	switch {
	case len(a.result) <= most:
	case c.whole:
		return done, ErrTooLarge
	default:
		done.State = StateNotReplayable
		return done, nil
	}
	return c.sealed(done, a.result)
}

// recovered uses the recovered body as the result.
func (c *command) recovered(_ context.Context, found Recovery) (*attempt, error) {
	return &attempt{state: &current{id: c.claim.ID}, result: found.Body}, nil
}

// result turns the ending of a run into the return values of Do.
func (c *command) result(end ending) ([]byte, error) {
	a, err := end.attempt, end.err
	if a != nil && a.panicked != nil {
		if a.panicked.aborted {
			runtime.Goexit() // as without Do, after the claim was settled
		}
		err = a.panicked.error()
	}
	switch end.outcome {
	case outcomeStored, outcomeUnstored: // what could not be stored was logged; there was an effect, and this is its result
		return a.result, nil
	case outcomeUnknown:
		return nil, joined(ErrOutcomeUnknown, err)
	case outcomeContended:
		return nil, joined(ErrContended, err)
	case outcomeLostClaim:
		return nil, joined(ErrStaleOwner, err)
	case outcomeUncertain:
		return nil, joined(ErrCommitUnknown, err)
	case outcomeReleased, outcomeTimedOut, outcomeUncommitted, outcomeUnreachable:
	}
	return nil, err
}

func joined(kind, err error) error {
	if err == nil || errors.Is(err, kind) {
		return kind
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// refused returns the error of a command that does not run.
func (c *command) refused(ctx context.Context, v decision, err error) error {
	c.state = decisionStates[v]
	switch v {
	case decisionReused:
		c.log(ctx, slog.LevelDebug, eventMismatch)
		c.count(ctx, c.telemetry.mismatched, 0)
		return ErrKeyReused
	case decisionInProgress:
		c.log(ctx, slog.LevelDebug, eventConflict)
		c.count(ctx, c.telemetry.inProgress, 0)
		return ErrInProgress
	case decisionUnknown:
		return ErrOutcomeUnknown
	case decisionNotStored:
		return ErrNotStored
	case decisionExpired:
		return ErrKeyExpired
	case decisionTooMany:
		return ErrTooManyOutstanding
	case decisionOverQuota:
		return &QuotaError{RetryIn: c.retryIn}
	case decisionStoreFailed:
		c.logDown(ctx, err)
	}
	return err
}
