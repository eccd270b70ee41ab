package inbox

import (
	"context"
	"database/sql"
	"errors"
)

// Served by the primary key. The upsert locks the row of the key, or waits for the
// transaction that does, so one message of a key at a time is between here and
// its commit, whichever process it is in. The second statement sees what the
// first one was decided by: nobody changes a locked row.
const (
	postgresAdvance = `
insert into {{inbox_sequences}} as s (consumer, key, seq)
values ($1, $2, $3)
on conflict (consumer, key) do update
set seq = excluded.seq
where s.seq + 1 = excluded.seq
	or $4 and s.seq < excluded.seq
returning seq`
	postgresSequence = `
select seq
from {{inbox_sequences}}
where consumer = $1
	and key = $2`
)

func (s *postgresStore) advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (place, error) {
	return advance(ctx, tx, s.advanceText, s.sequenceText, s.consumer, key, seq, skip)
}

func advance(ctx context.Context, tx *sql.Tx, advanceText, sequenceText, consumer, key string, seq int64, skip bool) (place, error) {
	var seen int64
	err := tx.QueryRowContext(ctx, advanceText, consumer, key, seq, skip).Scan(&seen)
	if err == nil {
		return nextInLine, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return 0, err
	}
	if err := tx.QueryRowContext(ctx, sequenceText, consumer, key).Scan(&seen); err != nil {
		return 0, err
	}
	if seq <= seen {
		return outdated, nil
	}
	return early, nil
}
