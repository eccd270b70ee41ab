package main

import (
	"context"
	"errors"
	"fmt"
)

// relayWAL counts the bytes of write-ahead log that relaying a message costs,
// against the SKIP LOCKED loop. VACUUM and CHECKPOINT come before the backlog is
// loaded, as most messages live shorter than a checkpoint interval: the first
// change of a page after a checkpoint would log the whole page, on both sides.
func relayWAL(ctx context.Context, b *bench) ([]result, error) {
	const id, unit = "relay-wal", "B/msg"
	batch, err := b.bestSkipLockedBatch(ctx)
	if err != nil {
		return nil, err
	}
	v, err := b.rounds(ctx, id, unit, b.oursWAL(false), b.oursWAL(true), b.skipLockedWAL(batch))
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("write-ahead log for relaying %d messages that were committed after the latest checkpoint, autovacuum off on the tables", walBacklog)
	against := fmt.Sprintf("lease by UPDATE with SKIP LOCKED, then DELETE, batches of %d", batch)
	return []result{
		compare(id, what+", no history", against, unit, oursAtMost(100), v[0], v[2]),
		compare(id+"-ratio", what+", no history", against, unit, ratioAtMost(0.1), v[0], v[2]),
		compare(id+"-history", what+", with history", against, unit, oursAtMost(900), v[1], v[2]),
	}, nil
}

func (b *bench) oursWAL(history bool) side {
	name := "ours"
	if history {
		name = "ours, history"
	}
	return side{name: name, n: walBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.exec(ctx, "start of the log", noAutovacuumOutbox, `truncate oncemill.outbox, oncemill.outbox_history`, `vacuum`, `checkpoint`); err != nil {
			return 0, err
		}
		if err := b.loadOutbox(ctx, n); err != nil {
			return 0, err
		}
		sink := newLedgerSink(b.traffic, n)
		value, err := b.walPerMessage(ctx, n, func() error {
			_, err := b.drain(ctx, n, history, sink)
			return err
		})
		return value, errors.Join(err, sink.verdict(), b.exec(ctx, "restore", autovacuumOutbox))
	}}
}

func (b *bench) skipLockedWAL(batch int) side {
	return side{name: fmt.Sprintf("SKIP LOCKED, batch %d", batch), n: walBacklog, run: func(ctx context.Context, n int) (float64, error) {
		if err := b.exec(ctx, "start of the log", skipLockedTable, `alter table skiplocked set (autovacuum_enabled = off)`, `truncate skiplocked`, `vacuum`, `checkpoint`); err != nil {
			return 0, err
		}
		if err := b.loadSkipLocked(ctx, n); err != nil {
			return 0, err
		}
		value, err := b.walPerMessage(ctx, n, func() error {
			_, err := drainSkipLocked(ctx, b.db, b.traffic, n, batch)
			return err
		})
		return value, errors.Join(err, b.exec(ctx, "restore", `alter table skiplocked reset (autovacuum_enabled)`))
	}}
}

// Only the partitions have rows.
const (
	noAutovacuumOutbox = `
alter table oncemill.outbox_0 set (autovacuum_enabled = off);
alter table oncemill.outbox_1 set (autovacuum_enabled = off);
alter table oncemill.outbox_2 set (autovacuum_enabled = off);
alter table oncemill.outbox_3 set (autovacuum_enabled = off)`

	autovacuumOutbox = `
alter table oncemill.outbox_0 reset (autovacuum_enabled);
alter table oncemill.outbox_1 reset (autovacuum_enabled);
alter table oncemill.outbox_2 reset (autovacuum_enabled);
alter table oncemill.outbox_3 reset (autovacuum_enabled)`
)

// walPerMessage returns the bytes of write-ahead log that fn adds, by message.
func (b *bench) walPerMessage(ctx context.Context, n int, fn func() error) (float64, error) {
	var before string
	if err := b.db.QueryRowContext(ctx, `select pg_current_wal_insert_lsn()::text`).Scan(&before); err != nil {
		return 0, fmt.Errorf("read position of the log: %w", err)
	}
	if err := fn(); err != nil {
		return 0, err
	}
	var added float64
	if err := b.db.QueryRowContext(ctx, `select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::pg_lsn)::float8`, before).Scan(&added); err != nil {
		return 0, fmt.Errorf("read position of the log: %w", err)
	}
	return added / float64(n), nil
}
