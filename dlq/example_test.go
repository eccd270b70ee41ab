package dlq_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/dlq"
)

// Replay what died in the last hour for one reason, page by page.
func ExampleStore_Replay() {
	replay := func(ctx context.Context, db *sql.DB) error {
		letters, err := dlq.New(db, dlq.Config{})
		if err != nil {
			return err
		}
		filter := dlq.Filter{
			States: []dlq.State{dlq.StateDead, dlq.StateHeld}, Topic: "orders", Reason: "unroutable",
			From: time.Now().Add(-time.Hour), OldestFirst: true,
		}
		for {
			page, err := letters.List(ctx, filter)
			if err != nil || len(page) == 0 {
				return err
			}
			ids := make([]int64, len(page))
			for i, l := range page {
				ids[i] = l.ID
			}
			accepted, err := letters.Replay(ctx, ids, dlq.Act{By: "ada", Reason: "the queue is bound again"})
			if state := (*dlq.StateError)(nil); err != nil && !errors.As(err, &state) {
				return err // else somebody else has acted on some of them
			}
			fmt.Println(len(accepted), "dead letters will be delivered again")
			filter.After = page[len(page)-1].Cursor()
		}
	}
	_ = replay
}
