package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
)

// postgresScheduled is the SQL of messages for later.
type postgresScheduled struct{ insert, cancel, next, move string }

func newPostgresScheduled(names oncemill.Config) postgresScheduled {
	return postgresScheduled{
		insert: names.Expand(postgresSchedule), cancel: names.Expand(postgresCancel),
		next: names.Expand(postgresNextDue), move: names.Expand(postgresMoveDue),
	}
}

const (
	rowsPerSchedule = 8_000 // 64,000 of the protocol's 65,535 parameters
	mostWaiting     = 10_000
)

// The sequence is read in the order of the values, so messages of one call and
// one time keep the call's order.
const postgresSchedule = `insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at) values `

var postgresScheduleParts = [scheduleColumns + 1]string{
	"(", ", ", ", ", ", ", ", ", ", ",
	", case ", "::smallint when 1 then statement_timestamp() else timestamptz 'epoch' end + ", "::bigint * interval '1 microsecond')",
}

// Served by the index on message_id. It waits for a move of the same row, and then
// finds it gone; a move does not wait for it.
const postgresCancel = `delete from {{scheduled}} where message_id = $1`

const (
	// The first entry of the primary key.
	postgresNextDue = `
select (extract(epoch from s.deliver_at - clock_timestamp()) * 1000000)::bigint
from {{scheduled}} s
order by s.deliver_at, s.seq
limit 1`

	// The lock on the lease is held for the length of this. What is due comes
	// first in the index, which statistics of a table that fills and empties do
	// not tell: the planner gets no other choice.
	postgresMoveLimits = `
set local lock_timeout = '1s'; set local statement_timeout = '3s';
set local enable_seqscan = off; set local enable_bitmapscan = off; set local jit = off`

	// Served by the primary key (deliver_at, seq), from its start. $1 is the
	// number of rows, $2 the byte budget, $3 keys that wait already.
	//
	// Rows that somebody is cancelling are locked. They are passed over, and so
	// are the later ones of their keys: the cancellation may be rolled back. A row
	// that is not locked once it was read cannot be cancelled before this
	// commits. Ids are taken after the sort.
	postgresMoveDue = `
with free as materialized (
	select s.deliver_at, s.seq, s.key, octet_length(s.payload) + octet_length(s.metadata) as bytes
	from {{scheduled}} s
	where s.deliver_at <= (select clock_timestamp())
		and s.key not in (select unnest((select $3::text[])))
	order by s.deliver_at, s.seq
	limit $1
	for update skip locked
), last as materialized (
	select deliver_at, seq from free order by deliver_at desc, seq desc limit 1
), held as materialized (
	select distinct s.key
	from {{scheduled}} s
	where (s.deliver_at, s.seq) <= ((select deliver_at from last), (select seq from last))
		and s.key <> ''
		and s.key not in (select unnest((select $3::text[])))
		and s.seq not in (select seq from free)
), chosen as (
	select deliver_at, seq
	from (
		select deliver_at, seq,
			sum(bytes) over (order by deliver_at, seq rows between unbounded preceding and 1 preceding) as bytes_before
		from free
		where key not in (select key from held)
	) f
	where coalesce(bytes_before, 0) < $2
), gone as (
	delete from {{scheduled}} s
	using chosen c
	where s.deliver_at = c.deliver_at and s.seq = c.seq
	returning s.deliver_at, s.seq, s.lane, s.topic, s.message_id, s.key, s.payload, s.metadata
), moved as (
	insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
	select lane, topic, message_id, key, payload, metadata
	from gone
	order by deliver_at, seq
	returning id
)
select (select count(*) from moved), array(select key from held)`
)

func (s *postgresStore) schedule(ctx context.Context, tx oncemill.Tx, rows []scheduledRow) error {
	return scheduleRows(ctx, tx, rows, rowsPerSchedule, s.scheduled.insert, postgresScheduleParts)
}

func (s *postgresStore) cancel(ctx context.Context, tx oncemill.Tx, messageID string) (int64, error) {
	return affected(tx.ExecContext(ctx, s.scheduled.cancel, messageID))
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (s *postgresStore) nextDue(ctx context.Context) (time.Duration, error) {
	return nextDue(s.db.QueryRowContext(ctx, s.scheduled.next))
}

func nextDue(row *sql.Row) (time.Duration, error) {
	var micros int64
	switch err := row.Scan(&micros); {
	case errors.Is(err, sql.ErrNoRows):
		return moveIdle, nil
	case err != nil:
		return 0, err
	}
	// Far ahead, the duration would overflow.
	return time.Duration(min(micros, moveIdle.Microseconds())) * time.Microsecond, nil
}

func (s *postgresStore) moveDue(ctx context.Context, guard guard) (moved int, err error) {
	var waiting []string
	for {
		var held []string
		_, err := s.guarded(ctx, postgresMoveLimits, guard, func(tx *sql.Tx) (bool, error) {
			err := tx.QueryRowContext(ctx, s.scheduled.move, moveRows, moveBytes, pq.Array(orEmpty(waiting))).Scan(&moved, pq.Array(&held))
			return moved > 0, err
		})
		// Where all that came first waits, others may not.
		if err != nil || moved > 0 || len(held) == 0 {
			return moved, err
		}
		waiting = slices.Concat(waiting, held)
		if len(waiting) > mostWaiting {
			return 0, fmt.Errorf("%d keys of scheduled messages wait for transactions that cancel one", len(waiting))
		}
	}
}
