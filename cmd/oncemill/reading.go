package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
)

// readTimeout is the default of --read-timeout.
const readTimeout = 30 * time.Second

// reading opens the database and runs fn, which only reads. It returns when --read-timeout is
// over, even if the driver still waits for a server that is silent. fn must use its context.
func (o *options) reading(cmd *cobra.Command, fn func(ctx context.Context, db *sql.DB, cfg oncemill.Config) error) error {
	_, err := within(cmd.Context(), o.readTimeout, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, o.database.with(func(db *sql.DB, cfg oncemill.Config) error { return fn(ctx, db, cfg) })
	})
	return err
}

// within calls fn, which only reads, with a time limit; 0: none.
func within[T any](ctx context.Context, limit time.Duration, fn func(ctx context.Context) (T, error)) (T, error) {
	if limit == 0 {
		limit = math.MaxInt64
	}
	found, err := bounded.Do(ctx, bounded.New(1), limit, func(ctx context.Context) (T, error) {
		found, err := fn(ctx)
		if err != nil && ctx.Err() != nil { // the server reports that it was canceled
			err = ctx.Err()
		}
		return found, err
	})
	switch {
	case err == nil:
	case ctx.Err() != nil:
		err = errors.New("interrupted; the database did not answer")
	case bounded.Silence(err):
		err = fmt.Errorf("the database gave no complete answer within %v: it is silent, a table is locked, or there is much to look at; "+
			"narrow the search down, or raise --read-timeout", limit)
	}
	return found, err
}
