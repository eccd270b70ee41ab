package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill/outbox"
)

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

// skipLocked is a side that drains a backlog with batches of a size.
func (b *bench) skipLocked(n, batch int) side {
	return side{name: skipLockedName(batch), n: n, run: func(ctx context.Context, n int) (values, error) {
		if err := errors.Join(b.loadSkipLocked(ctx, n), b.settled(ctx)); err != nil {
			return nil, err
		}
		took, err := b.drainSkipLocked(ctx, n, batch)
		return perSecond(n, took), err
	}}
}

func skipLockedName(batch int) string {
	return fmt.Sprintf("lease by UPDATE with SKIP LOCKED, then DELETE, prepared, batches of %d", batch)
}

// loadSkipLocked fills the empty table with the first n messages of the traffic, as
// loaded does.
func (b *bench) loadSkipLocked(ctx context.Context, n int) error {
	if err := b.exec(ctx, "empty table", skipLockedTable, `truncate skiplocked`, `checkpoint`); err != nil {
		return err
	}
	return b.copyIn(ctx, "skiplocked", []string{"topic", "message_id", "key", "payload", "metadata"}, n,
		func(i int) ([]any, error) {
			return []any{topic, b.traffic.id(i), b.traffic.key(i), b.traffic.payload(i), b.traffic.metadata(i)}, nil
		})
}

// metadata of message i, as our publisher encodes it.
func (t *traffic) metadata(i int) []byte {
	return fmt.Appendf(nil, `{"%s":"%s"}`, outbox.KeyMetadata, t.key(i))
}

// copyIn loads n rows. They are inserted, not copied: pages that COPY fills do not stay in
// the shared buffers, where those stay that services have just filled.
func (b *bench) copyIn(ctx context.Context, table string, columns []string, n int, row func(i int) ([]any, error)) error {
	conn, err := pgx.Connect(ctx, b.postgres)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	defer conn.Close(ctx)
	var list string
	for i, column := range columns {
		if i > 0 {
			list += ", "
		}
		list += column
	}
	_, err = conn.Exec(ctx, `create temp table arrivals as select `+list+` from `+table+` limit 0`)
	if err == nil {
		_, err = conn.CopyFrom(ctx, pgx.Identifier{"arrivals"}, columns, pgx.CopyFromSlice(n, row))
	}
	if err == nil {
		_, err = conn.Exec(ctx, `insert into `+table+` (`+list+`) select * from arrivals`)
	}
	if err != nil {
		return fmt.Errorf("load %s: %w", table, err)
	}
	return nil
}

// drainSkipLocked leases, hands out and deletes all n rows with prepared statements, batch
// rows at a time, and returns the time it took. Handing out is the same as in the sink that
// confirms at once: it checks each message.
func (b *bench) drainSkipLocked(ctx context.Context, n, batch int) (time.Duration, error) {
	conn, err := b.db.Conn(ctx)
	if err != nil {
		return 0, fmt.Errorf("skip locked: %w", err)
	}
	defer conn.Close()
	book := newLedger(b.traffic, n)
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
	return took, book.check(false)
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
