package idempotency

import (
	"context"
	"errors"
	"log/slog"

	"github.com/oncemill/oncemill/internal/boundtx"
)

// withoutKey runs a request that has no key and does not need one.
func (x *exchange) withoutKey(ctx context.Context) {
	if !x.transactional {
		x.next.ServeHTTP(x.w, x.r)
		return
	}
	x.claim.Endpoint = endpointOf(x.r.Method, "", x.r.Pattern)
	if !x.readBody() {
		return
	}
	x.begin()
	store, ok := x.store.(*SQLStore)
	if !ok {
		panic(ErrNotTransactional) // TxMiddleware has looked
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), x.end)
	defer cancel()
	x.respond(ctx, x.runUnkeyed(ctx, store))
}

// runUnkeyed runs a handler in a transaction of its own, without a claim, and again if that
// lost against another.
func (x *exchange) runUnkeyed(ctx context.Context, store *SQLStore) ending {
	for lost := 0; ; lost++ {
		end := x.tryUnkeyed(ctx, store)
		if end.outcome != outcomeContended || !x.backOff(lost) {
			return end
		}
		end.attempt.discard()
	}
}

func (x *exchange) tryUnkeyed(ctx context.Context, store *SQLStore) ending {
	t, err := store.beginPlain(ctx, x.cfg.Transactions.Isolation)
	if err != nil {
		return ending{outcome: outcomeUnreachable, err: err}
	}
	defer t.rollback() // a no-op after the commit
	a := x.start(ctx, t)
	a.wait(x.deadline, x.expire)
	if report := x.report(a); report != reportSucceeded || a.late { //nolint:contextcheck // which a panic is logged with
		lost, _ := t.undo(ctx, a, report)
		switch {
		case a.late:
			return ending{outcome: outcomeTimedOut, attempt: a}
		case lost:
			return ending{outcome: outcomeContended, attempt: a, err: a.err}
		}
		return ending{outcome: outcomeReleased, attempt: a}
	}
	if err = t.Close(ErrTxEnded); err == nil {
		err = t.commit()
	}
	switch {
	case err == nil:
		x.cfg.OnCommit()
		return ending{outcome: outcomeStored, attempt: a}
	case errors.Is(err, boundtx.ErrUnknown):
		x.log(ctx, slog.LevelError, "outcome of a commit is unknown", slog.Any("error", err))
		return ending{outcome: outcomeUncertain, attempt: a, err: err}
	case t.mayWin(err):
		return ending{outcome: outcomeContended, attempt: a, err: err}
	}
	x.log(ctx, slog.LevelError, "request not committed", slog.Any("error", err))
	return ending{outcome: outcomeUncommitted, attempt: a, err: err}
}
