package idempotency

import (
	"context"
)

// Settle ends a key whose outcome is unknown, for an operator who has found out the
// outcome. With found.RunAgain the key may run again; otherwise its answer is stored,
// like that of Config.Failures.Recover. token is the part of a status URL after
// Config.Answers.StatusPath.
//
// Settle returns [ErrNotUnknown] for a key that has no run, is running, or has ended, and
// for a zero Recovery. It returns a [*RecoveryError] for an answer that cannot be stored.
// Of several concurrent calls, one settles the key.
func (e *Engine) Settle(ctx context.Context, token string, found Recovery) error {
	id, ok := parseToken(token)
	if !ok || !found.RunAgain && found.Status == 0 {
		return ErrNotUnknown
	}
	record, exists, err := e.store.Find(ctx, id)
	if err != nil {
		return err
	}
	if !exists || record.State != StateStarted || record.LeaseLeft > 0 {
		return ErrNotUnknown
	}
	in := e.newIntent(false)
	in.claim.ID, in.claim.Caller, in.claim.Endpoint = id, record.Caller, record.Endpoint
	if err := in.fits(found); err != nil {
		return err
	}
	taken, granted, err := e.store.TakeOver(ctx, in.claim, record.Owner)
	switch {
	case err != nil:
		return err
	case !granted:
		return ErrNotUnknown
	}
	in.take(taken)
	if found.RunAgain {
		return e.store.Release(ctx, id, in.owner)
	}
	c, err := in.foundOut(found)
	if err != nil {
		return err
	}
	return e.store.Complete(ctx, id, in.owner, c)
}
