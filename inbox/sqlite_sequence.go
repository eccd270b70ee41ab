package inbox

import (
	"context"
	"database/sql"
)

// Served by the primary key. There is one writer.
const (
	sqliteAdvance = `
insert into {{inbox_sequences}} as s (consumer, key, seq)
values ($1, $2, $3)
on conflict (consumer, key) do update
set seq = excluded.seq
where s.seq + 1 = excluded.seq
	or $4 and s.seq < excluded.seq
returning seq`
	sqliteSequence = `
select seq
from {{inbox_sequences}}
where consumer = $1
	and key = $2`
)

func (s *sqliteStore) advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (place, error) {
	return advance(ctx, tx, s.advanceText, s.sequenceText, s.consumer, key, seq, skip)
}
