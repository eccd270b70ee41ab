package idempotency

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/contain"
)

// Command is what is to be done once.
type Command struct {
	Scope   Scope  // Route is not needed
	Name    string // of the operation, for example "close-month"
	Key     string // unique to this run of it: of a scheduled job, the time it is due
	Payload any    // a []byte, or what encoding/json encodes: compared, not stored
}

// Result is what a command returned, the first time or before.
type Result[T any] struct {
	Value    T
	Replayed bool // fn did not run: an earlier run of the command returned Value
}

// Do runs fn once for each key, and returns what it returned, as encoding/json
// keeps it. With a [SQLStore] fn runs in a transaction that it finds with
// [TxFromContext] in its context, and its writes, what it publishes to the outbox
// and the result commit together; otherwise it is run as by Engine.Middleware.
//
// An error of fn rolls back and is returned; the key may run again. A panic
// becomes a [*oncemill.PanicError]. The other errors: [*KeyError], [ErrInProgress],
// [ErrKeyReused], [ErrKeyExpired], [ErrNotStored], [ErrOutcomeUnknown],
// [ErrCommitUnknown], [ErrTooManyOutstanding], [ErrStaleOwner] (another owner was
// faster: call again), and those of the store.
func Do[T any](ctx context.Context, e *Engine, cmd Command, fn func(ctx context.Context) (T, error)) (Result[T], error) {
	var result Result[T]
	encoded, replayed, err := e.do(ctx, cmd, func(ctx context.Context) ([]byte, error) {
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

func (e *Engine) do(ctx context.Context, cmd Command, fn func(context.Context) ([]byte, error)) (result []byte, replayed bool, err error) {
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
	in := &intent{claim: e.newClaim(transactional), transactional: transactional, began: time.Now()}
	in.claim.ID = hashID(e.cfg.Secret, "oncemill command key", cmd.Scope.Tenant, cmd.Scope.Principal, cmd.Name, cmd.Key)
	in.claim.Caller = hashCaller(e.cfg.Secret, cmd.Scope)
	in.claim.Fingerprint = newFingerprint([]byte("command"), []byte(cmd.Name), payload)
	in.claim.Endpoint = printable("command "+cmd.Name, maxKey)
	if e.cfg.TenantAttribute {
		in.tenant = cmd.Scope.Tenant
	}
	in.count(ctx, e.telemetry.received, 0)
	record, v, err := e.decide(context.WithoutCancel(ctx), in)
	if v == inProgress && e.cfg.InProgress == Wait {
		record, v, err = e.wait(ctx, in)
	}
	switch v {
	case replay:
		return e.replayCommand(ctx, in, record)
	case run:
	case recoverFirst:
		return nil, false, e.recoverCommand(ctx, in, record)
	default:
		return nil, false, commandError(v, err)
	}
	in.count(ctx, e.telemetry.started, 0)
	deadline := in.began.Add(e.cfg.Timeout)
	runCtx, _ := contextWithRun(context.WithoutCancel(ctx), in.claim.ID)
	if transactional {
		result, err = e.commandInTx(runCtx, in, record.Owner, deadline, fn)
	} else {
		result, err = e.commandSnapshot(runCtx, in, record.Owner, deadline, fn)
	}
	return result, false, err
}

func (e *Engine) replayCommand(ctx context.Context, in *intent, record Record) ([]byte, bool, error) {
	plain, err := e.codec.decode(record.ID, record.Response)
	if err != nil {
		return nil, false, err
	}
	in.count(ctx, e.telemetry.replayed, 0)
	return plain, true, nil
}

// recoverCommand asks for the error's sake: a command that Config.Recover knows to
// have failed is released, so that calling again runs it.
func (e *Engine) recoverCommand(ctx context.Context, in *intent, record Record) error {
	found, err := e.cfg.Recover(ctx, record)
	if err == nil && found.RunAgain {
		e.release(ctx, in, record.Owner)
		return ErrInProgress
	}
	if err := e.store.Extend(ctx, in.claim.ID, record.Owner, 0); err != nil {
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	return ErrOutcomeUnknown
}

func commandError(v verdict, err error) error {
	switch v {
	case reused:
		return ErrKeyReused
	case inProgress:
		return ErrInProgress
	case outcomeLost:
		return ErrOutcomeUnknown
	case notStored:
		return ErrNotStored
	case expired:
		return ErrKeyExpired
	case tooMany:
		return ErrTooManyOutstanding
	}
	return err
}

// call runs fn under the deadline and makes an error of its panic.
func call(ctx context.Context, deadline time.Time, fn func(context.Context) ([]byte, error)) (result []byte, err error) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	err = contain.Call(func() (err error) {
		result, err = fn(ctx)
		return err
	})
	if err == nil {
		err = ctx.Err()
	}
	return result, err
}

func (e *Engine) commandCompletion(in *intent, result []byte) (Completion, error) {
	c := Completion{State: Completed, Retention: e.cfg.Retention, Refuse: e.cfg.RefuseExpired}
	if e.cfg.RetentionFor != nil {
		if d := e.cfg.RetentionFor(nil, 0); d > 0 {
			c.Retention = d
		}
	}
	if len(result) > e.cfg.MaxResponse {
		c.State = NotReplayable
		return c, nil
	}
	var err error
	c.Response, err = e.codec.encode(in.claim.ID, result)
	c.Large = len(c.Response) > e.cfg.LargeAbove && c.Refuse == 0
	return c, err
}

func (e *Engine) commandInTx(ctx context.Context, in *intent, owner Owner, deadline time.Time, fn func(context.Context) ([]byte, error)) ([]byte, error) {
	store, ok := e.store.(*SQLStore)
	if !ok {
		return nil, ErrNotTransactional // do has looked
	}
	ctx, cancel := context.WithDeadline(ctx, in.began.Add(e.cfg.Lease))
	defer cancel()
	for try := 0; ; try++ {
		result, outcome, err := e.commandAttempt(ctx, store, in, owner, deadline, fn)
		switch outcome {
		case committed:
			e.cfg.OnCommit()
			return result, nil
		case runAgain:
			if e.yield(deadline, try) {
				continue
			}
			e.release(ctx, in, owner)
		case rolledBack, unreachable:
			e.release(ctx, in, owner)
		case lostClaim:
			in.count(ctx, e.telemetry.stale, 0)
			err = fmt.Errorf("%w: %w", ErrStaleOwner, err)
		case uncertain:
			in.count(ctx, e.telemetry.completeFailures, 0)
			err = fmt.Errorf("%w: %w", ErrCommitUnknown, err)
		}
		return nil, err
	}
}

func (e *Engine) commandAttempt(ctx context.Context, store *SQLStore, in *intent, owner Owner, deadline time.Time, fn func(context.Context) ([]byte, error)) ([]byte, txOutcome, error) {
	t, err := store.begin(ctx, in.claim.ID, owner, e.cfg.Isolation, e.cfg.Timeout)
	if err != nil {
		return nil, unreachable, err
	}
	defer t.rollback()
	result, err := call(oncemill.ContextWithTx(ctx, t), deadline, fn)
	if err != nil {
		if t.beaten.Load() {
			return nil, runAgain, err
		}
		return nil, rolledBack, err
	}
	c, err := e.commandCompletion(in, result)
	if err != nil {
		return nil, rolledBack, err
	}
	outcome, err := e.finish(ctx, in, t, owner, c)
	return result, outcome, err
}

func (e *Engine) commandSnapshot(ctx context.Context, in *intent, owner Owner, deadline time.Time, fn func(context.Context) ([]byte, error)) ([]byte, error) {
	result, err := call(ctx, deadline, fn)
	if err != nil {
		e.release(ctx, in, owner)
		return nil, err
	}
	c, err := e.commandCompletion(in, result)
	if err == nil {
		err = e.complete(ctx, in, owner, c)
	}
	return result, err
}
