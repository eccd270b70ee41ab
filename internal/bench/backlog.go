package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/oncemill/oncemill/outbox"
)

// metadata of message i, as our publisher encodes it.
func (t *traffic) metadata(i int) []byte {
	return fmt.Appendf(nil, `{"%s":"%s"}`, outbox.KeyMetadata, t.key(i))
}

// loadOutbox fills the empty outbox with the first n messages of the traffic.
func (b *bench) loadOutbox(ctx context.Context, n int) error {
	if err := b.exec(ctx, "empty outbox", `truncate oncemill.outbox, oncemill.outbox_history`, `checkpoint`); err != nil {
		return err
	}
	return b.copyIn(ctx, pgx.Identifier{"oncemill", "outbox"},
		[]string{"lane", "topic", "message_id", "key", "payload", "metadata"}, n, b.traffic.outboxRow)
}

// outboxRow is message i as our publisher stores it.
func (t *traffic) outboxRow(i int) []any {
	key, id := t.key(i), t.id(i)
	return []any{int16(outbox.Lane(key, id)), topic, id, key, t.payload(i), t.metadata(i)}
}

// loadSkipLocked fills the empty table of the SKIP LOCKED loop in the same way.
func (b *bench) loadSkipLocked(ctx context.Context, n int) error {
	if err := b.exec(ctx, "empty table", skipLockedTable, `truncate skiplocked`, `checkpoint`); err != nil {
		return err
	}
	return b.copyIn(ctx, pgx.Identifier{"skiplocked"},
		[]string{"topic", "message_id", "key", "payload", "metadata"}, n,
		func(i int) []any {
			return []any{topic, b.traffic.id(i), b.traffic.key(i), b.traffic.payload(i), b.traffic.metadata(i)}
		})
}

// Each message in a transaction of its own, as services commit them.
const (
	forwarderStage = `
drop table if exists staged;
create unlogged table staged (uuid text, envelope json)`

	forwarderCommitEach = `
do $$
declare r record;
begin
	for r in select * from staged loop
		insert into "watermill_forwarder" (uuid, payload, metadata, transaction_id)
		values (r.uuid, r.envelope, '{}', pg_current_xact_id());
		commit;
	end loop;
end $$`

	forwarderReset = `
truncate "watermill_forwarder";
update "watermill_offsets_forwarder" set offset_acked = 0, last_processed_transaction_id = '0'`
)

// loadForwarder fills the table that the forwarder reads, whose schema is there.
// Payloads are wrapped as its own decorating publisher does it.
func (b *bench) loadForwarder(ctx context.Context, n int) error {
	if err := b.exec(ctx, "empty table", forwarderReset, forwarderStage, `checkpoint`); err != nil {
		return err
	}
	var failed error
	err := b.copyIn(ctx, pgx.Identifier{"staged"}, []string{"uuid", "envelope"}, n, func(i int) []any {
		envelope, err := json.Marshal(map[string]any{
			"destination_topic": topic,
			"uuid":              b.traffic.id(i),
			"payload":           b.traffic.payload(i),
			"metadata":          map[string]string{outbox.KeyMetadata: b.traffic.key(i)},
		})
		if err != nil {
			failed = err
		}
		return []any{b.traffic.id(i), envelope}
	})
	if failed != nil {
		return fmt.Errorf("wrap message: %w", failed)
	}
	if err != nil {
		return err
	}
	conn, err := b.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	// Loading is not measured, so it need not wait for the disk.
	for _, text := range []string{`set synchronous_commit = off`, forwarderCommitEach, `reset synchronous_commit`, `drop table staged`} {
		if _, err := conn.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("load forwarder's table: %w", err)
		}
	}
	return nil
}

// copyIn loads n rows. They are inserted, not copied: pages that COPY fills do not stay
// in the shared buffers, where those stay that services have just filled.
func (b *bench) copyIn(ctx context.Context, table pgx.Identifier, columns []string, n int, row func(i int) []any) error {
	conn, err := pgx.Connect(ctx, b.servers.postgres)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	defer conn.Close(ctx)
	list := strings.Join(columns, ", ")
	if _, err := conn.Exec(ctx, fmt.Sprintf(`create temp table arrivals as select %s from %s limit 0`, list, table.Sanitize())); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	source := pgx.CopyFromSlice(n, func(i int) ([]any, error) { return row(i), nil })
	if _, err := conn.CopyFrom(ctx, pgx.Identifier{"arrivals"}, columns, source); err != nil {
		return fmt.Errorf("load %s: %w", table.Sanitize(), err)
	}
	if _, err := conn.Exec(ctx, fmt.Sprintf(`insert into %s (%s) select %[2]s from arrivals`, table.Sanitize(), list)); err != nil {
		return fmt.Errorf("load %s: %w", table.Sanitize(), err)
	}
	return nil
}

// settled brings the database into the state from which a run on a backlog starts:
// statistics known, nothing to vacuum. The rows have come after the latest checkpoint,
// as those of a relay have that is not far behind.
func (b *bench) settled(ctx context.Context) error {
	return b.exec(ctx, "settle", `vacuum (analyze)`)
}

// settle is for a run that has no backlog: dirty pages are written before it begins.
func (b *bench) settle(ctx context.Context) error {
	return b.exec(ctx, "settle", `vacuum (analyze)`, `checkpoint`)
}

func (b *bench) exec(ctx context.Context, what string, texts ...string) error {
	for _, text := range texts {
		if _, err := b.db.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
}
