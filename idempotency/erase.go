package idempotency

import (
	"context"
	"fmt"

	"github.com/oncemill/oncemill/internal/keystore"
)

// Erased is what an erasure has done.
type Erased struct {
	Keys int // deleted, with their answers

	// Left are keys that were running, or that other transactions were changing. Erase again
	// when they have ended, if this is not 0.
	Left int
}

// Erase deletes everything that is stored for a caller: keys, answers, Location, resource,
// correlation and trace ids, and the counts of KeyConfig.Quota. Everything that had
// committed before the call is gone after it, except what Erased counts as Left. First
// withdraw the caller's credentials: requests that come meanwhile leave new records.
//
// A retry with an erased key runs again, as a new request: the record that it has run is
// erased, too. So erase when the caller no longer retries, or refuse the caller's
// requests before this package sees them.
//
// The table is read in slices of 2,000 keys, and each slice with keys of the caller is a
// short transaction: an erasure takes seconds for each million keys of all callers, and
// keeps nobody waiting. It can be repeated after an error. The audit gets the numbers, who
// and why, and nothing of the caller.
func (a *Admin) Erase(ctx context.Context, caller Caller, act Act) (Erased, error) {
	var done Erased
	if err := act.check(); err != nil {
		return done, err
	}
	by := keystore.Act{By: act.By, Reason: act.Reason}
	var from []byte
	for more := true; more; {
		part, err := a.eraseSlice(ctx, caller, from, by)
		done.Keys, done.Left = done.Keys+part.keys, done.Left+part.left
		if err != nil {
			return done, fmt.Errorf("idempotency: erase keys: %w", err)
		}
		from, more = part.end, part.more
	}
	_, err := within(ctx, a.store, func(ctx context.Context) (struct{}, error) { return struct{}{}, a.store.usage.Erase(ctx, caller) })
	if err != nil {
		return done, fmt.Errorf("idempotency: erase counts: %w", err)
	}
	by.Details = fmt.Sprintf("finished: %d keys erased, %d left", done.Keys, done.Left)
	_, err = within(ctx, a.store, func(ctx context.Context) (struct{}, error) { return struct{}{}, a.keys.Erased(ctx, by) })
	if err != nil {
		return done, fmt.Errorf("idempotency: erase keys: %w", err)
	}
	return done, nil
}

// erasedSlice is what was done in a slice.
type erasedSlice struct {
	keys, left int
	end        []byte
	more       bool
}

func (a *Admin) eraseSlice(ctx context.Context, caller Caller, from []byte, act keystore.Act) (part erasedSlice, err error) {
	part, err = within(ctx, a.store, func(ctx context.Context) (p erasedSlice, err error) {
		if p.end, p.more, err = a.keys.Slice(ctx, from, adminSlice); err == nil {
			p.left, err = a.keys.KeysOf(ctx, caller, from, p.end)
		}
		return p, err
	})
	if err != nil || part.left == 0 {
		return part, err
	}
	// Before and after: a replay may put a record back while the transaction has not
	// committed, and a failure before it can be repeated.
	if err := a.removeBetween(ctx, caller, from, part.end); err != nil {
		return part, err
	}
	type answer struct {
		ids  []keystore.ID
		left int
	}
	done, err := within(ctx, a.store, func(ctx context.Context) (d answer, err error) {
		if d.ids, err = a.keys.Erase(ctx, caller, from, part.end, act); err == nil {
			d.left, err = a.keys.KeysOf(ctx, caller, from, part.end)
		}
		return d, err
	})
	if err != nil {
		return part, err
	}
	part.keys, part.left = len(done.ids), done.left
	ids := make([]ID, len(done.ids))
	for i, id := range done.ids {
		ids[i] = ID(id)
	}
	if len(ids) == 0 {
		return part, nil
	}
	return part, a.remove(ctx, ids)
}

// removeBetween removes the records of a slice from the cache.
func (a *Admin) removeBetween(ctx context.Context, caller Caller, from, end []byte) error {
	if a.cfg.Cache == nil {
		return nil
	}
	of := [16]byte(caller)
	found, err := within(ctx, a.store, func(ctx context.Context) ([]keystore.Summary, error) {
		return a.keys.Between(ctx, from, end, keystore.Filter{Caller: &of, Phases: keystore.PhaseAny, Limit: adminSlice})
	})
	if err != nil || len(found) == 0 {
		return err
	}
	ids := make([]ID, len(found))
	for i := range found {
		ids[i] = ID(found[i].ID)
	}
	return a.remove(ctx, ids)
}
