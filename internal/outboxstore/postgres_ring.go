package outboxstore

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/shorttx"
)

// A turn takes about 20 ms and no lock. Ids taken stay taken if it is interrupted.
var turnLimits = shorttx.Limits{Lock: time.Second, Statement: 2 * time.Second}

const (
	// One row for each partition. The size comes from the file system, without a lock.
	// The last number counts the index entries for which scans found no row: entries of
	// dead rows that a snapshot keeps. (Others are marked, and met once.)
	postgresRingState = `
select
	(select last_value from {{outbox_id}}),
	pg_relation_size(p.partition),
	(
		select coalesce(sum(pg_stat_get_tuples_returned(i.indexrelid) - pg_stat_get_tuples_fetched(i.indexrelid)), 0)::bigint
		from pg_index i
		where i.indrelid = p.partition
	)
from unnest(array['{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{outbox_3}}'::regclass])
	with ordinality as p (partition, n)
order by p.n`

	// Any role sees that a walsender exists; only some see its state. Walsenders that
	// take a backup or decode for logical replication replay nothing. A physical slot
	// belongs to a standby, which may be disconnected at the moment.
	postgresStandby = `
select exists (
	select
	from pg_stat_get_wal_senders() w
	where coalesce(w.state, '') <> 'backup'
		and not exists (select from pg_replication_slots s where s.active_pid = w.pid and s.slot_type = 'logical')
) or exists (
	select from pg_replication_slots s where s.slot_type = 'physical' and not s.temporary
)`

	// Takes the remaining ids of the partition being written. nextval never goes back,
	// so writers need not be locked out. It does no harm if a writer or another upkeep
	// takes some of them meanwhile.
	postgresTurn = `
select count(nextval('{{outbox_id}}'))
from generate_series(1, 65536 - ((select last_value from {{outbox_id}}) & 65535))`

	// Any role sees these, unlike the age of another role's transaction.
	postgresHolders = `
select distinct l.virtualtransaction
from pg_locks l
where l.granted
	and l.database = (select oid from pg_database where datname = current_database())
	and l.relation = '{{partition}}'::regclass
	and l.pid is distinct from pg_backend_pid()`
)

const (
	// Reads pass over this many bytes of dead rows in less than a millisecond, so a
	// truncation gains nothing.
	worthTruncating = 8 << 20

	// Truncating this much is worthwhile once reads have passed over it many times.
	worthWhereSlow = 1 << 20
)

// maintainRing truncates the partitions that hold only dead rows, and turns the ring
// when that is worthwhile.
func (s *postgresStore) maintainRing(ctx context.Context, guard Guard, done *Maintained) error {
	if s.truncation == TruncateNever {
		return nil
	}
	last, sizes, passed, err := s.ringState(ctx)
	if err != nil {
		return fmt.Errorf("look at the ring: %w", err)
	}
	slow := s.toll.due(last, passed)
	dirty := func(i int) bool { return sizes[i] >= worthTruncating || sizes[i] >= worthWhereSlow && slow[i] }
	if !slices.ContainsFunc([]int{0, 1, 2, 3}, dirty) {
		s.ring.allFree()
		return nil
	}
	if s.truncation == TruncateAuto {
		var standby bool
		if err := s.db.QueryRowContext(ctx, s.upkeep.standby).Scan(&standby); err != nil {
			return fmt.Errorf("look for standbys: %w", err)
		}
		if standby {
			s.ring.allFree()
			return nil
		}
	}
	writing, clean := partitionOf(last), true // clean: all except the partition being written
	for i := range sizes {
		// The partition being written is not empty for long. The one that comes next
		// must be cleaned before its turn, so it is not skipped.
		if i == writing || !dirty(i) {
			s.ring.free(i)
			clean = clean && (i == writing || sizes[i] < worthWhereSlow)
			continue
		}
		emptied, blocked, err := s.truncate(ctx, guard, i)
		switch {
		case err != nil:
			return fmt.Errorf("truncate partition %d of the ring: %w", i, err)
		case emptied:
			done.Truncated++
		case blocked:
			done.Blocked++
			done.Again = max(done.Again, s.ring.pause(i, time.Now()))
		}
		clean = clean && emptied
	}
	// While another partition holds rows, turning would spread a backlog over the whole
	// ring, and nothing could be truncated.
	if slow[writing] && clean && sizes[writing] >= worthWhereSlow {
		turned, err := s.turn(ctx, guard)
		if err != nil {
			return fmt.Errorf("turn the ring: %w", err)
		}
		if turned {
			done.Turned++
			done.Again = soonest
		}
	}
	return nil
}

// ringState returns the last id given out, and for each partition its size in bytes and
// the entries that scans have passed over.
func (s *postgresStore) ringState(ctx context.Context) (last int64, sizes, passed [4]int64, err error) {
	rows, err := s.db.QueryContext(ctx, s.upkeep.ringState)
	if err != nil {
		return last, sizes, passed, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for i := 0; rows.Next() && i < len(sizes); i++ {
		if err := rows.Scan(&last, &sizes[i], &passed[i]); err != nil {
			return last, sizes, passed, err
		}
	}
	return last, sizes, passed, rows.Err()
}

// turn advances the ids to the next partition of the ring.
func (s *postgresStore) turn(ctx context.Context, guard Guard) (turned bool, err error) {
	turned, err = s.guarded(ctx, turnLimits, guard, func(tx *sql.Tx) (bool, error) {
		_, err := tx.ExecContext(ctx, s.upkeep.turn)
		return true, err
	})
	if err != nil && passedOver(err) {
		return false, nil
	}
	return turned, err
}

// truncate removes the dead rows of a partition of the ring, unless it has other rows
// or somebody's lock blocks that.
func (s *postgresStore) truncate(ctx context.Context, guard Guard, i int) (emptied, blocked bool, err error) {
	wait, ok := s.ring.may(i, time.Now())
	if !ok {
		return false, true, nil
	}
	emptied, err = s.guarded(ctx, shorttx.Limits{Lock: wait, Statement: statementWaits * wait}, guard, func(tx *sql.Tx) (bool, error) {
		return ifEmpty(ctx, tx, s.upkeep.partition[i], `truncate `+s.upkeep.partition[i])
	})
	switch {
	case emptied:
		s.ring.granted(i)
		return true, false, nil
	case err == nil || !passedOver(err):
		s.ring.free(i)
		return false, false, err
	}
	holders, err := s.holders(ctx, i)
	if err != nil {
		return false, true, err
	}
	s.ring.refused(i, time.Now(), holders)
	return false, true, nil
}

// holders returns the transactions that hold a lock on a partition of the ring.
func (s *postgresStore) holders(ctx context.Context, i int) (holders []string, err error) {
	rows, err := s.db.QueryContext(ctx, s.upkeep.holders[i])
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var h string
		if err := rows.Scan(&h); err != nil {
			return nil, err
		}
		holders = append(holders, h)
	}
	return holders, rows.Err()
}

// ifEmpty executes text, which empties or drops a partition, if the partition has only
// dead rows. An open writer holds a lock on the partition from its insert to its end.
// So once SHARE ROW EXCLUSIVE is granted, which excludes writers and other upkeep,
// every row is either committed, and visible to the test that follows as a separate
// statement, or gone. The test passes over all dead rows, so readers are excluded only
// after it. The test before the lock avoids locking partitions that are in use.
func ifEmpty(ctx context.Context, tx *sql.Tx, partition, text string) (bool, error) {
	empty := func() (empty bool, err error) {
		err = tx.QueryRowContext(ctx, `select not exists (select from `+partition+`)`).Scan(&empty)
		return empty, err
	}
	if ok, err := empty(); err != nil || !ok {
		return false, err
	}
	if _, err := tx.ExecContext(ctx, `lock table `+partition+` in share row exclusive mode`); err != nil {
		return false, err
	}
	if ok, err := empty(); err != nil || !ok {
		return false, err
	}
	if _, err := tx.ExecContext(ctx, `lock table `+partition+` in access exclusive mode`); err != nil {
		return false, err
	}
	_, err := tx.ExecContext(ctx, text)
	return err == nil, err
}
