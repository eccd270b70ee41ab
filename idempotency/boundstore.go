package idempotency

import (
	"context"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
)

// Limits on the store's database calls. While a server is silent, a driver may not return
// although its context has ended; requests are answered without it.
const (
	// storeLimit bounds one call of the store, if its context allows as much. It includes
	// the wait for a connection, or on SQLite for the turn to write.
	storeLimit = 30 * time.Second

	// stepLimit bounds the statements before and after a handler, and a batch of a purge.
	stepLimit = 10 * time.Second

	// mostAbandoned is how many calls that have not returned may exist. Each holds a
	// connection.
	mostAbandoned = 64
)

// found is a record, and whether it exists or was granted.
type found struct {
	record Record
	ok     bool
}

// within runs a call of the store. do must return everything through its result.
func within[T any](ctx context.Context, s *SQLStore, do func(ctx context.Context) (T, error)) (T, error) {
	return bounded.Do(ctx, s.calls, storeLimit, do)
}

// Claim implements [Store.Claim]. On SQLite it reads first, so that a duplicate does not
// wait for the writer. On PostgreSQL it always takes one round trip.
func (s *SQLStore) Claim(ctx context.Context, claim Claim) (Record, bool, error) {
	f, err := within(ctx, s, func(ctx context.Context) (f found, err error) {
		f.record, f.ok, err = s.claim(ctx, claim)
		return f, err
	})
	return f.record, f.ok, err
}

// TakeOver implements [Store.TakeOver].
func (s *SQLStore) TakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	f, err := within(ctx, s, func(ctx context.Context) (f found, err error) {
		f.record, f.ok, err = s.takeOver(ctx, c, from)
		return f, err
	})
	return f.record, f.ok, err
}

// Find implements [Store.Find].
func (s *SQLStore) Find(ctx context.Context, id ID) (Record, bool, error) {
	f, err := within(ctx, s, func(ctx context.Context) (f found, err error) {
		f.record, f.ok, err = s.find(ctx, id)
		return f, err
	})
	return f.record, f.ok, err
}

// Outstanding implements [Store.Outstanding].
func (s *SQLStore) Outstanding(ctx context.Context, caller Caller, limit int) (int, error) {
	return within(ctx, s, func(ctx context.Context) (int, error) { return s.outstanding(ctx, caller, limit) })
}

// Extend implements [Store.Extend].
func (s *SQLStore) Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) error {
	return s.set(ctx, s.q.extend, id[:], owner.Token[:], owner.Fence, lease.Microseconds())
}

// Release implements [Store.Release].
func (s *SQLStore) Release(ctx context.Context, id ID, owner Owner) error {
	return s.set(ctx, s.q.release, id[:], owner.Token[:], owner.Fence)
}

// Complete implements [Store.Complete].
func (s *SQLStore) Complete(ctx context.Context, id ID, owner Owner, c Completion) error {
	_, err := within(ctx, s, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.complete(ctx, id, owner, c) })
	return err
}

// Purge implements [Store.Purge].
func (s *SQLStore) Purge(ctx context.Context, limit int) (int, error) {
	return bounded.Do(ctx, s.calls, stepLimit, func(ctx context.Context) (int, error) { return s.purge(ctx, limit) })
}
