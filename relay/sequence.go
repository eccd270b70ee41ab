package relay

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/outbox"
)

const (
	// Each lane's highest id is one probe of an index. Dead letters count while their
	// messages can come back. An id that is 2^48 or more ahead of the sequence was
	// never given out (see the check in package outbox), and does not count.
	postgresHighest = `
select coalesce(max(m.id), 0)
from generate_series(0, 31) as l (lane)
cross join (select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{outbox_id}} s) as b (bound)
cross join lateral (
	(select p.id from {{parked}} p where p.lane = l.lane and p.id <= b.bound order by p.id desc limit 1)
	union all
	(select d.row_id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null and d.lane = l.lane and d.row_id <= b.bound
		order by d.row_id desc
		limit 1)
) m (id)`

	// The highest dead letter id that its sequence can have given out.
	postgresHighestLetter = `
select coalesce(max(d.id), 0)
from {{dead_letters}} d
where d.id <= (select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{dead_letters_id}} s)`

	// The dead letters' own ids: inserts that reuse an id fail.
	postgresLettersBehind = `
select s.last_value - case when s.is_called then 0 else 1 end < (` + postgresHighestLetter + `)
from {{dead_letters_id}} s`

	// Writers of dead letters hold row exclusive, which this lock excludes.
	postgresLockLetters = `lock table {{dead_letters}} in share row exclusive mode`

	postgresRepairLetters = `
select setval('{{dead_letters_id}}', greatest((` + postgresHighestLetter + `), (select last_value from {{dead_letters_id}})), true)`

	sqliteHighest = `
with recursive l (lane) as (select 0 union all select lane + 1 from l where lane < 31),
b (bound) as (
	select min(coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0), 9223372036854775807 - (1 << 48)) + (1 << 48)
)
select max(
	coalesce((select p.id from {{parked}} p where p.lane = l.lane and p.id <= b.bound order by p.id desc limit 1), 0),
	coalesce((
		select d.row_id
		from {{dead_letters}} d
		where d.source = 'relay' and d.closed_at is null and d.lane = l.lane and d.row_id <= b.bound
		order by d.row_id desc
		limit 1
	), 0)
) as id
from l, b
order by id desc
limit 1`
)

// highestParked returns the highest outbox id that is in use in parked, or in dead
// letters whose messages can come back.
func highestParked(ctx context.Context, box *outbox.Outbox) (highest int64, err error) {
	text := postgresHighest
	if box.Config().Database.Dialect == oncemill.SQLite {
		text = sqliteHighest
	}
	if err := box.DB().QueryRowContext(ctx, database.Of(box.Config().Database).Expand(text)).Scan(&highest); err != nil {
		return 0, fmt.Errorf("look for the highest parked id: %w", err)
	}
	return highest, nil
}

// checkSequence returns outbox.ErrSequenceBehind if the outbox would give out ids that
// parked messages or dead letters have. On PostgreSQL it also does so if dead letters
// cannot be written because their own ids are in use. It complements
// outboxqueue.Queue.Check.
func checkSequence(ctx context.Context, box *outbox.Outbox) error {
	highest, err := highestParked(ctx, box)
	if err != nil {
		return err
	}
	last, err := outboxqueue.Of(box).LastID(ctx) // later: ids only grow
	if err != nil {
		return err
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id parked or in dead letters %d)", outbox.ErrSequenceBehind, last, highest)
	}
	if box.Config().Database.Dialect == oncemill.SQLite {
		return nil // it looks at the rows itself
	}
	var behind bool
	if err := box.DB().QueryRowContext(ctx, database.Of(box.Config().Database).Expand(postgresLettersBehind)).Scan(&behind); err != nil {
		return fmt.Errorf("check id sequence of dead letters: %w", err)
	}
	if behind {
		return fmt.Errorf("%w (that of the dead letters)", outbox.ErrSequenceBehind)
	}
	return nil
}

// RepairSequence sets the outbox's id sequence above every id in use, in the outbox,
// its history, parked messages and dead letters, with writers locked out. It returns
// the last id given out. It repairs outbox.ErrSequenceBehind, which keeps a relay from
// starting, and is harmless if nothing is wrong.
func RepairSequence(ctx context.Context, box *outbox.Outbox) (last int64, err error) {
	if err := repairLetters(ctx, box); err != nil {
		return 0, fmt.Errorf("repair sequence of dead letters: %w", err)
	}
	for last = -1; ; {
		floor, err := highestParked(ctx, box)
		if err != nil {
			return 0, err
		}
		if floor <= last {
			return last, nil
		}
		// A row may leave the outbox between this check and the lock on it, so there is
		// a second check after it.
		if last, err = outboxqueue.Of(box).RepairSequence(ctx, floor); err != nil {
			return 0, err
		}
	}
}

func repairLetters(ctx context.Context, box *outbox.Outbox) error {
	names := database.Of(box.Config().Database)
	if names.Dialect == oncemill.SQLite {
		return nil // it looks at the rows itself
	}
	return shorttx.Run(ctx, box.DB(), shorttx.Repair, func(tx *sql.Tx) error {
		for _, text := range []string{postgresLockLetters, postgresRepairLetters} { // the highest id is that after the lock
			if _, err := tx.ExecContext(ctx, names.Expand(text)); err != nil {
				return err
			}
		}
		return nil
	})
}
