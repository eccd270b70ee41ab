// Package litetx runs SQLite transactions of the kind that is asked for,
// whatever the data source name says.
package litetx

import (
	"context"
	"database/sql"
)

// Write runs fn in a transaction that is a writer from its start, so that it
// waits for its turn instead of failing where it first writes. An error of fn
// rolls it back.
func Write(ctx context.Context, db *sql.DB, fn func(conn *sql.Conn) error) error {
	return run(ctx, db, `begin immediate`, fn)
}

// Read runs fn in a transaction that sees one state of the database and waits
// for no writer. fn must not write.
func Read(ctx context.Context, db *sql.DB, fn func(conn *sql.Conn) error) error {
	return run(ctx, db, `begin deferred`, fn)
}

func run(ctx context.Context, db *sql.DB, begin string, fn func(conn *sql.Conn) error) (err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // returns the connection to the pool
	if _, err := conn.ExecContext(ctx, begin); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_, _ = conn.ExecContext(context.WithoutCancel(ctx), `rollback`) // the first error is the one to report
		}
	}()
	if err := fn(conn); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, `commit`)
	return err
}
