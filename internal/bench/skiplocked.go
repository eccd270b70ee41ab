package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/lib/pq"
)

// skipLockedBatches are the batch sizes that are tried; the best one is compared.
var skipLockedBatches = []int{100, 500, 2000}

// The queue that most outboxes are: no lanes, a lease in each row.
const (
	skipLockedTable = `
create table if not exists skiplocked (
	id           bigint generated always as identity primary key,
	locked_until timestamptz,
	topic        text        not null,
	message_id   text        not null,
	key          text        not null,
	payload      bytea       not null,
	metadata     bytea       not null,
	created_at   timestamptz not null default clock_timestamp()
)`

	// Served by the primary key, from its start.
	skipLockedLease = `
update skiplocked
set locked_until = clock_timestamp() + interval '30 s'
where id in (
	select id
	from skiplocked
	where locked_until is null or locked_until < clock_timestamp()
	order by id
	limit $1
	for update skip locked
)
returning id, topic, message_id, key, payload, metadata, created_at`

	skipLockedDelete = `delete from skiplocked where id = any ($1)`
)

// drainSkipLocked leases, hands out and deletes all n rows with prepared
// statements, batch rows at a time, and returns the time it took. Handing out is
// the same as the sink that confirms at once: it checks each message.
func drainSkipLocked(ctx context.Context, db *sql.DB, t *traffic, n, batch int) (time.Duration, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return 0, fmt.Errorf("skip locked: %w", err)
	}
	defer conn.Close()
	book := newLedger(t, n)
	begin := time.Now()
	lease, err := conn.PrepareContext(ctx, skipLockedLease)
	if err != nil {
		return 0, fmt.Errorf("skip locked: prepare lease: %w", err)
	}
	defer lease.Close()
	remove, err := conn.PrepareContext(ctx, skipLockedDelete)
	if err != nil {
		return 0, fmt.Errorf("skip locked: prepare delete: %w", err)
	}
	defer remove.Close()
	for {
		ids, err := leaseBatch(ctx, lease, batch, book)
		if err != nil {
			return 0, fmt.Errorf("skip locked: lease: %w", err)
		}
		if len(ids) == 0 {
			break
		}
		if _, err := remove.ExecContext(ctx, pq.Array(ids)); err != nil {
			return 0, fmt.Errorf("skip locked: delete: %w", err)
		}
	}
	took := time.Since(begin)
	// An UPDATE returns its rows in no order, so none is asked for.
	return took, book.verdict(false)
}

func leaseBatch(ctx context.Context, lease *sql.Stmt, batch int, book *ledger) (ids []int64, err error) {
	rows, err := lease.QueryContext(ctx, batch)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		var topic, messageID, key string
		var payload, metadata []byte
		var createdAt time.Time
		if err := rows.Scan(&id, &topic, &messageID, &key, &payload, &metadata, &createdAt); err != nil {
			return nil, err
		}
		book.arrive(messageID, payload)
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
