package outboxstore

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
)

type postgresStore struct {
	db      *sql.DB
	history time.Duration // 0: none
	ask     bool          // Config.Archive decides what is removed
	log     *slog.Logger
	names   database.Database

	readText, readBulky   string
	readPieceText         string
	readAheadText         string
	removeText, moveText  string
	removeFree, moveFree  string
	sweep                 [4]postgresSweep // by the partition of the ring
	checkText, repairText string
	forgedText            string
	lastText              string
	upkeep                postgresUpkeep
	scheduled             postgresScheduled
	past                  postgresHistory
	historyLocked         rest
	pace                  pace
	ring                  patience
	toll                  toll
	truncation            Truncation
}

func newPostgresStore(db *sql.DB, names database.Database, history time.Duration, ask bool, log *slog.Logger) *postgresStore {
	s := &postgresStore{
		pace: pace{most: mostAside, mostWaiting: mostWaiting, behind: beginning, round: beginning},
		db:   db, history: history, ask: ask, log: log, names: names,
		readText:  names.Expand(postgresRead),
		readBulky: names.Expand(postgresReadBulky),

		readPieceText: names.Expand(postgresReadPiece),

		readAheadText: names.Expand(postgresReadAhead),
		removeText:    names.Expand(postgresRemove),
		moveText:      names.Expand(postgresMove),
		removeFree:    names.Expand(postgresRemoveFree),
		moveFree:      names.Expand(postgresMoveFree),
		checkText:     names.Expand(postgresCheck),
		repairText:    names.Expand(postgresRepair),
		forgedText:    names.Expand(postgresForged),
		lastText:      names.Expand(postgresLast),
		upkeep:        newPostgresUpkeep(names),
		scheduled:     newPostgresScheduled(names),
		past:          newPostgresHistory(names),
	}
	for i := range s.sweep {
		s.sweep[i] = newPostgresSweep(names, i)
	}
	return s
}

// An id that is 2^48 or more ahead of the sequence was never given out: at a million a
// second that takes nine years, and a sequence that was left behind began at 1. The
// writer of the row chose the id. It blocks nothing, and no sequence is set to it.
const (
	postgresLast = `select s.last_value - case when s.is_called then 0 else 1 end from {{outbox_id}} s`

	// The highest id that the sequence can have given out.
	postgresBound = `select least(s.last_value, 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48) from {{outbox_id}} s`

	// The highest id of each lane is one probe of an index, and so is that of each day
	// of the history.
	postgresHighest = `
select greatest(
	(select coalesce(max(m.id), 0)
		from generate_series(0, 31) as l (lane)
		cross join lateral (
			select o.id
			from {{outbox}} o
			where o.lane = l.lane and o.id <= (` + postgresBound + `)
			order by o.id desc
			limit 1
		) m),
	(select coalesce(max(h.id), 0) from {{outbox_history}} h where h.id <= (` + postgresBound + `)))`

	// By the same indexes.
	postgresForged = `
select o.lane, o.id, o.message_id
from generate_series(0, 31) as l (lane)
cross join lateral (
	select o.lane, o.id, o.message_id
	from {{outbox}} o
	where o.lane = l.lane and o.id > (` + postgresBound + `)
	order by o.id desc
	limit 1
) o
union all
(select h.lane, h.id, h.message_id
from {{outbox_history}} h
where h.id > (` + postgresBound + `)
limit 10)
limit 10`

	// The sequence of scheduled messages, and what lies beyond it.
	postgresScheduledSequence = `pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass`
	postgresScheduledBound    = `select least(coalesce(pg_sequence_last_value(` + postgresScheduledSequence + `), 0), 9223372036854775807 - (1::bigint << 48)) + (1::bigint << 48)`

	postgresCheck = `
select
	(` + postgresLast + `),
	(select q.seqcache from pg_sequence q where q.seqrelid = '{{outbox_id}}'::regclass),
	(` + postgresHighest + `),
	coalesce(pg_sequence_last_value(` + postgresScheduledSequence + `), 0) < (` + postgresScheduledSeen + `),
	pg_is_in_recovery(),
	current_setting('transaction_read_only')::boolean`

	// Scheduled messages with the same due time are ordered by their own sequence, so
	// it has to differ. No index serves the highest value; both ends of the primary key
	// approximate it well enough.
	postgresScheduledSeen = `
select coalesce(max(e.seq), 0)
from (
	(select s.seq from {{scheduled}} s order by s.deliver_at, s.seq limit 100)
	union all
	(select s.seq from {{scheduled}} s order by s.deliver_at desc, s.seq desc limit 100)
) e
where e.seq <= (` + postgresScheduledBound + `)`

	// Writers hold row exclusive, which this lock excludes; readers continue.
	postgresLockWriters = `lock table {{outbox}}, {{scheduled}} in share row exclusive mode`

	// A scan of the whole table, unless nothing is scheduled.
	postgresRepairScheduled = `
select setval(q.seq, greatest((select coalesce(max(s.seq), 1) from {{scheduled}} s where s.seq <= (` + postgresScheduledBound + `)), pg_sequence_last_value(q.seq)), true)
from (select ` + postgresScheduledSequence + ` as seq) q`

	postgresRepair = `
select setval('{{outbox_id}}', greatest((` + postgresHighest + `), (select last_value from {{outbox_id}}), $1), true)`
)

func (s *postgresStore) Check(ctx context.Context) error {
	var last, cache, highest int64
	var later, standby, readOnly bool
	if err := s.db.QueryRowContext(ctx, s.checkText).Scan(&last, &cache, &highest, &later, &standby, &readOnly); err != nil {
		return fmt.Errorf("check id sequence: %w", err)
	}
	switch {
	case standby:
		return fmt.Errorf("%w (it is a standby)", ErrReadOnly)
	case readOnly:
		return fmt.Errorf("%w (default_transaction_read_only is on)", ErrReadOnly)
	}
	if cache > 1 {
		return fmt.Errorf("%w (cache %d)", ErrSequenceCached, cache)
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id in use %d)", ErrSequenceBehind, last, highest)
	}
	if later {
		return fmt.Errorf("%w (that of the scheduled messages)", ErrSequenceBehind)
	}
	forged, err := scanForged(s.db.QueryContext(ctx, s.forgedText))
	return reportForged(ctx, s.log, forged, err)
}

func (s *postgresStore) LastID(ctx context.Context) (last int64, err error) {
	if err := s.db.QueryRowContext(ctx, s.lastText).Scan(&last); err != nil {
		return 0, fmt.Errorf("read id sequence: %w", err)
	}
	return last, nil
}

func (s *postgresStore) RepairSequence(ctx context.Context, floor int64) (last int64, err error) {
	err = shorttx.Run(ctx, s.db, shorttx.Repair, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.names.Expand(postgresLockWriters)); err != nil {
			return fmt.Errorf("lock writers out: %w", err)
		}
		// The highest id must be looked up after the lock.
		if err := tx.QueryRowContext(ctx, s.repairText, floor).Scan(&last); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.names.Expand(postgresRepairScheduled)); err != nil {
			return fmt.Errorf("of scheduled messages: %w", err)
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	return last, nil
}
