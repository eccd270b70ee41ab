package inbox

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
)

// Limits on the inbox's database calls. While a server is silent, a driver may not return
// although its context has ended; the inbox continues without it.
const (
	// callLimit bounds one step: the statements before and after a handler, a failure
	// record, a batch of a purge.
	callLimit = 10 * time.Second

	// mostAbandoned is how many steps that have not returned may exist. Each holds a
	// connection.
	mostAbandoned = 64
)

// ask calls the database outside the transaction of a message. f must return everything
// through its result.
func ask[T any](ctx context.Context, in *Inbox, f func(ctx context.Context) (T, error)) (T, error) {
	return bounded.Do(ctx, in.calls, callLimit, f)
}

// within runs statements in the transaction of a message, as ask does.
func within[T any](ctx context.Context, tx *boundtx.Tx, f func(ctx context.Context, tx *sql.Tx) (T, error)) (T, error) {
	return boundtx.Do(ctx, tx, callLimit, func(ctx context.Context) (T, error) { return f(ctx, tx.Raw) })
}

// noAnswer reports whether the database did not answer in time. The message is not at
// fault.
func noAnswer(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, bounded.ErrTooManyAbandoned)
}
