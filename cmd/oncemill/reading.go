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
	limit := o.readTimeout
	if limit == 0 {
		limit = math.MaxInt64
	}
	ctx := cmd.Context()
	_, err := bounded.Do(ctx, bounded.New(1), limit, func(ctx context.Context) (struct{}, error) {
		err := o.database.with(func(db *sql.DB, cfg oncemill.Config) error { return fn(ctx, db, cfg) })
		if err != nil && ctx.Err() != nil { // the server reports that it was canceled
			err = ctx.Err()
		}
		return struct{}{}, err
	})
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("interrupted; the database did not answer")
	case bounded.Silence(err):
		return fmt.Errorf("the database gave no complete answer within %v: it is silent, a table is locked, or there is much to look at; "+
			"narrow the search down, or raise --read-timeout", limit)
	}
	return err
}
