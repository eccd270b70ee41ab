package steer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/audit"
	"github.com/oncemill/oncemill/steer"
)

func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "steer")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", oncemill.SQLiteDSN(filepath.Join(dir, "shop.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := oncemill.Migrate(ctx, db, oncemill.Config{}, audit.Migrations, steer.Migrations); err != nil {
		log.Fatal(err)
	}

	control, err := steer.New(db, steer.Config{})
	if err != nil {
		log.Fatal(err)
	}
	orders := steer.Target{Kind: steer.Topic, Name: "orders"}
	if err := control.Pause(ctx, orders, steer.Act{By: "ada", Reason: "their queue is full"}); err != nil {
		log.Fatal(err)
	}
	var paused *steer.PausedError
	if err := control.Pause(ctx, orders, steer.Act{By: "bob", Reason: "the same"}); errors.As(err, &paused) {
		fmt.Println("paused by", paused.By, "since", !paused.Since.IsZero(), "because", paused.Reason)
	}
	if err := control.Resume(ctx, orders, steer.Act{By: "ada"}); err != nil {
		log.Fatal(err)
	}
	left, err := control.List(ctx)
	fmt.Println(len(left), err)
	// Output:
	// paused by ada since true because their queue is full
	// 0 <nil>
}
