package audit_test

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/audit"
)

// Print what was done to a dead letter within a day, the newest act first.
func ExampleLog_List() {
	history := func(ctx context.Context, db *sql.DB, letter int64) error {
		log, err := audit.New(db, audit.Config{})
		if err != nil {
			return err
		}
		entries, err := log.List(ctx, audit.Filter{Subject: fmt.Sprintf("dead_letter %d", letter), Since: time.Now().Add(-24 * time.Hour)})
		if err != nil {
			return err
		}
		for _, e := range entries {
			fmt.Println(e.At, e.By, e.Action, e.Reason)
		}
		return nil
	}
	_ = history
}
