package oncemill_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/relay"
)

//snippet:open
func open(ctx context.Context, path string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(path))
	if err != nil {
		return nil, err
	}
	db.SetMaxIdleConns(8)
	err = oncemill.Migrate(ctx, db, oncemill.Config{}, outbox.Migrations, audit.Migrations, dlq.Migrations, relay.Migrations)
	if err != nil {
		_ = db.Close() // the first error is the one to report
		return nil, err
	}
	return db, nil
}

//snippet:end

func ExampleSQLiteDSN() {
	dir, err := os.MkdirTemp("", "oncemill-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	db, err := open(context.Background(), filepath.Join(dir, "orders.db"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	fmt.Println(oncemill.CheckSQLite(context.Background(), db))
	// Output: <nil>
}
