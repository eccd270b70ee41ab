package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// copyOutText reads the columns that a relay needs, in no order: the fastest way
// out of PostgreSQL.
const copyOutText = `copy (
	select lane, id, topic, message_id, key, payload, metadata, created_at
	from oncemill.outbox
) to stdout (format binary)`

// copyOut reads the n rows of the outbox, which stay there.
func copyOut(ctx context.Context, dsn string, n int) (time.Duration, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return 0, fmt.Errorf("copy: %w", err)
	}
	defer conn.Close(ctx)
	var received byteCounter
	begin := time.Now()
	tag, err := conn.PgConn().CopyTo(ctx, &received, copyOutText)
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("copy: %w", err)
	}
	if tag.RowsAffected() != int64(n) || int(received) < n*payloadSize {
		return 0, fmt.Errorf("copy: got %d rows with %d bytes, not %d rows", tag.RowsAffected(), received, n)
	}
	return took, nil
}

type byteCounter int

func (c *byteCounter) Write(p []byte) (int, error) {
	*c += byteCounter(len(p))
	return len(p), nil
}
