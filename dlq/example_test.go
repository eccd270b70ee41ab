package dlq_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
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

// Correct a message that its consumer cannot handle as it is.
func ExampleStore_ReplayEdited() {
	correct := func(ctx context.Context, letters *dlq.Store, id int64, payload []byte) error {
		err := letters.ReplayEdited(ctx, id, dlq.Edit{Payload: payload}, dlq.Act{By: "ada", Reason: "wrong currency"})
		if refused := (*dlq.EditError)(nil); errors.As(err, &refused) {
			return fmt.Errorf("publish a new message instead: %w", err)
		}
		return err
	}
	_ = correct
}

// Move the dead letters of a consumer to another database.
func ExampleStore_Export() {
	move := func(ctx context.Context, from, to *dlq.Store, file *os.File) error {
		n, err := from.Export(ctx, file, dlq.Filter{Consumer: "stock", States: []dlq.State{dlq.StateDead}})
		if err != nil {
			return err
		}
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return err
		}
		done, err := to.Import(ctx, file, dlq.Act{By: "ada", Reason: "new database"})
		fmt.Println(n, "exported,", done.Added, "imported,", done.Existing, "were there")
		return err
	}
	_ = move
}
