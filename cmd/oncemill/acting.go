package main

import (
	"context"
	"database/sql"
	"errors"
	"math"

	"github.com/spf13/cobra"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
)

// using gives a function a database; see databaseOptions.
type using func(fn func(db *sql.DB, cfg oncemill.Config) error) error

// acting calls act, which changes something, with what open returns for a database. open only
// reads, and has the time limit of reads: a server that is silent from the start does not keep
// the command. act has none, but can be interrupted: then acting returns a second later, even if
// the driver still waits for a server that is silent, and with the command ends what act does.
func acting[T any](o *options, cmd *cobra.Command, database using, open func(ctx context.Context, db *sql.DB, cfg oncemill.Config) (T, error), act func(opened T) error) error {
	const unlimited = math.MaxInt64
	_, err := bounded.Do(cmd.Context(), bounded.New(1), unlimited, func(context.Context) (struct{}, error) {
		return struct{}{}, database(func(db *sql.DB, cfg oncemill.Config) error {
			opened, err := within(cmd.Context(), o.readTimeout, func(ctx context.Context) (T, error) { return open(ctx, db, cfg) })
			if err != nil {
				return err
			}
			return act(opened)
		})
	})
	if errors.Is(err, bounded.ErrAbandoned) {
		return errors.New("interrupted; the database did not answer, so what it was asked for may still happen")
	}
	return err
}
