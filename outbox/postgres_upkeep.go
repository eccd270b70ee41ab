package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgresUpkeep keeps the ring free of dead rows and the history in days.
type postgresUpkeep struct {
	names     oncemill.Config
	partition [4]string
	ringState string
	days      string
	lockDays  string
	dayThere  string
	blocked   string
	holders   [4]string
	turn      string
}

func newPostgresUpkeep(names oncemill.Config) postgresUpkeep {
	u := postgresUpkeep{
		names: names, ringState: names.Expand(postgresRingState), days: names.Expand(postgresDays),
		lockDays: names.Expand(postgresLockHistory), dayThere: names.Expand(postgresDayThere),
		blocked: names.Expand(postgresBlocked), turn: names.Expand(postgresTurn),
	}
	for i := range u.partition {
		u.partition[i] = names.Table(fmt.Sprintf("outbox_%d", i))
		u.holders[i] = names.Expand(strings.ReplaceAll(postgresHolders, "{{partition}}", fmt.Sprintf("{{outbox_%d}}", i)))
	}
	return u
}

const (
	// Each transaction bounds its waits: others queue behind the lock that a
	// truncate or a drop waits for.
	postgresUpkeepLimits = `set local lock_timeout = '10ms'; set local statement_timeout = '250ms'`

	// Making a day takes no lock that a move or a reader waits for.
	postgresMakeDayLimits = `set local lock_timeout = '2s'; set local statement_timeout = '4s'`

	// The sizes are a look at the file system, no lock. The last number counts the
	// index entries that scans have met without finding a row: those of dead rows
	// that somebody's snapshot keeps. (Others are marked, and met once.)
	postgresRingState = `
select
	(select last_value from {{outbox_id}}),
	pg_relation_size('{{outbox_0}}'), pg_relation_size('{{outbox_1}}'),
	pg_relation_size('{{outbox_2}}'), pg_relation_size('{{outbox_3}}'),
	(select coalesce(sum(pg_stat_get_tuples_returned(i.indexrelid) - pg_stat_get_tuples_fetched(i.indexrelid)), 0)::bigint
		from pg_index i
		where i.indrelid in ('{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{outbox_3}}'::regclass))`

	// Takes the ids that the partition being written has left. nextval never goes
	// back, so no writer needs to be kept out, and it does no harm if a writer or
	// another upkeep takes some of them meanwhile.
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

	// The days that there are, as YYYYMMDD. One that is dropped meanwhile has no
	// size.
	postgresDays = `
select right(c.relname, 8), coalesce(pg_relation_size(c.oid) > 0, false)
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = '{{outbox_history}}'::regclass
order by 1`

	// Upkeep excludes other upkeep by it, but no move and no reader; attaching a
	// partition takes it anyway.
	postgresLockHistory = `lock table {{outbox_history}} in share update exclusive mode`

	postgresDayThere = `
select exists (
	select
	from pg_inherits i
	where i.inhparent = '{{outbox_history}}'::regclass
		and i.inhrelid = to_regclass($1)
)`
)

const (
	worthTruncating = 1 << 20 // bytes of a partition that its dead rows may take
	daysAhead       = 3
	dayLayout       = "20060102"
)

func (s *postgresStore) maintain(ctx context.Context, guard guard) (Maintained, error) {
	var done Maintained
	var last int64
	var passed int64
	var sizes [4]int64
	if err := s.db.QueryRowContext(ctx, s.upkeep.ringState).Scan(&last, &sizes[0], &sizes[1], &sizes[2], &sizes[3], &passed); err != nil {
		return done, fmt.Errorf("look at the ring: %w", err)
	}
	clean := true // all but the partition being written
	for i, size := range sizes {
		// The partition being written is not empty for long; the one that comes
		// next must be cleaned before its turn, so it is not left out.
		if i == partitionOf(last) || size < worthTruncating {
			s.ring.free(i)
			continue
		}
		emptied, err := s.truncate(ctx, guard, i)
		switch {
		case emptied:
			done.Truncated++
			continue
		case err != nil && passedOver(err):
			done.Blocked++
			done.Again = max(done.Again, s.ring.pause(i, time.Now()))
		case err != nil:
			return done, fmt.Errorf("truncate partition %d of the ring: %w", i, err)
		}
		clean = false
	}
	if s.toll.due(last, passed) && clean && sizes[partitionOf(last)] >= worthTruncating {
		turned, err := s.guarded(ctx, limitsText(time.Second, 2*time.Second), guard, func(tx *sql.Tx) (bool, error) {
			_, err := tx.ExecContext(ctx, s.upkeep.turn)
			return true, err
		})
		switch {
		case turned:
			done.Turned++
			done.Again = soonest
		case err != nil && !passedOver(err):
			return done, fmt.Errorf("turn the ring: %w", err)
		}
	}
	return done, s.maintainHistory(ctx, guard, &done)
}

// errHeld says that a partition is not even tried, since somebody holds it for
// long.
var errHeld = &pq.Error{Code: "55P03", Message: "held for long"}

// truncate empties a partition of the ring of its dead rows, if it can.
func (s *postgresStore) truncate(ctx context.Context, guard guard, i int) (emptied bool, err error) {
	wait, ok := s.ring.may(i, time.Now())
	if !ok {
		return false, errHeld
	}
	emptied, err = s.guarded(ctx, limitsText(wait, statementWaits*wait), guard, func(tx *sql.Tx) (bool, error) {
		return ifEmpty(ctx, tx, s.upkeep.partition[i], `truncate `+s.upkeep.partition[i])
	})
	switch {
	case emptied:
		s.ring.granted(i)
		return true, nil
	case err == nil || !passedOver(err):
		s.ring.free(i)
		return false, err
	}
	holders, failed := s.holders(ctx, i)
	if failed != nil {
		return false, failed
	}
	s.ring.refused(i, time.Now(), holders)
	return false, err
}

// holders returns the transactions that have a lock on a partition of the ring.
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

func limitsText(lock, statement time.Duration) string {
	return fmt.Sprintf(`set local lock_timeout = %d; set local statement_timeout = %d`, lock.Milliseconds(), statement.Milliseconds())
}

// passedOver tells the errors that only say: not now. Somebody holds the
// partition (an open writer, a dump), or looking at it took too long.
func passedOver(err error) bool {
	switch sqlerr.State(err) {
	case "55P03", "57014":
		return true
	}
	return sqlerr.Retryable(err)
}

// guarded runs fn in a short transaction of its own that the caller's lease
// guards, and reports whether fn did anything. READ COMMITTED is spelled out:
// under a REPEATABLE READ default a test for emptiness made after a lock still
// sees the world before it, and a committed row would be destroyed.
func (s *postgresStore) guarded(ctx context.Context, limits string, guard guard, fn func(tx *sql.Tx) (did bool, err error)) (did bool, err error) {
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return false, err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if _, err := tx.ExecContext(ctx, limits); err != nil {
		return false, err
	}
	if held, err := guard(ctx, tx); err != nil || !held {
		return false, err
	}
	if did, err := fn(tx); err != nil || !did {
		return false, err
	}
	err = tx.Commit()
	return err == nil, err
}

// ifEmpty executes text, which empties or drops a partition, if no row is in it
// but dead ones. An open writer holds a lock on the partition from its insert to
// its end, so once SHARE ROW EXCLUSIVE is granted, which keeps writers and other
// upkeep out, every row is either committed, and seen by the test that follows as
// a statement of its own, or gone. The test passes over all dead rows, so readers
// are kept out only after it. The test before the lock keeps the lock off
// partitions that it would find in use.
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

// maintainHistory makes the partitions of today and the days ahead, empties
// those that are past their time, and drops them a day later, when no reader
// remembers them. What is to be archived goes when it has been.
func (s *postgresStore) maintainHistory(ctx context.Context, guard guard, done *Maintained) error {
	now, days, err := s.historyDays(ctx)
	if err != nil {
		return fmt.Errorf("look at the history: %w", err)
	}
	if s.history > 0 {
		if err := s.makeDays(ctx, guard, now, days, done); err != nil {
			return fmt.Errorf("make partition of the history: %w", err)
		}
	}
	for name, filled := range days {
		day, err := time.Parse(dayLayout, name)
		if err != nil {
			continue // not one of ours
		}
		text, table := "", s.upkeep.dayTable(name)
		switch expired := s.expiredFor(now, day); {
		case expired > 24*time.Hour:
			text = `drop table ` + table
		case expired > 0 && filled:
			text = `truncate ` + table
		default:
			continue
		}
		retired, err := s.guarded(ctx, postgresUpkeepLimits, guard, func(tx *sql.Tx) (bool, error) {
			if there, err := s.lockedDay(ctx, tx, name); err != nil || !there {
				return false, err
			}
			if s.ask {
				return ifEmpty(ctx, tx, table, text)
			}
			_, err := tx.ExecContext(ctx, text)
			return true, err
		})
		switch {
		case retired:
			done.Retired++
		case err != nil && !passedOver(err):
			return fmt.Errorf("retire partition of the history: %w", err)
		}
	}
	return nil
}

// expiredFor tells for how long nothing of a day has had to be kept. Without a
// history that is so from the day's end on.
func (s *postgresStore) expiredFor(now, day time.Time) time.Duration {
	return now.Sub(day.AddDate(0, 0, 1)) - s.history
}

func (s *postgresStore) makeDays(ctx context.Context, guard guard, now time.Time, days map[string]bool, done *Maintained) error {
	today := now.Truncate(24 * time.Hour)
	for i := range daysAhead + 1 {
		day := today.AddDate(0, 0, i)
		if _, there := days[day.Format(dayLayout)]; there {
			continue
		}
		made, err := s.guarded(ctx, postgresMakeDayLimits, guard, func(tx *sql.Tx) (bool, error) {
			if there, err := s.lockedDay(ctx, tx, day.Format(dayLayout)); err != nil || there {
				return false, err
			}
			return true, s.makeDay(ctx, tx, day)
		})
		switch {
		case made:
			done.Made++
		case err != nil && !passedOver(err):
			return err
		}
	}
	return nil
}

// historyDays returns the server's time (UTC) and the days that have a
// partition, with whether it holds anything.
func (s *postgresStore) historyDays(ctx context.Context) (now time.Time, days map[string]bool, err error) {
	if err := s.db.QueryRowContext(ctx, `select clock_timestamp()`).Scan(&now); err != nil {
		return now, nil, err
	}
	rows, err := s.db.QueryContext(ctx, s.upkeep.days)
	if err != nil {
		return now, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	days = map[string]bool{}
	for rows.Next() {
		var name string
		var filled bool
		if err := rows.Scan(&name, &filled); err != nil {
			return now, nil, err
		}
		days[name] = filled
	}
	return now.UTC(), days, rows.Err()
}

func (u postgresUpkeep) dayTable(name string) string { return u.names.Table("outbox_history_" + name) }

// lockedDay locks the history against other upkeep and then reports whether a
// day has its partition.
func (s *postgresStore) lockedDay(ctx context.Context, tx *sql.Tx, name string) (there bool, err error) {
	if _, err := tx.ExecContext(ctx, s.upkeep.lockDays); err != nil {
		return false, err
	}
	err = tx.QueryRowContext(ctx, s.upkeep.dayThere, s.upkeep.dayTable(name)).Scan(&there)
	return there, err
}

// CREATE and ATTACH, unlike CREATE ... PARTITION OF, leave the history open to
// the moves of other sessions. There is no key; where a publication for all tables
// publishes deletions, the archive's would fail without an identity.
const postgresMakeDay = `
create table {{day}} (like {{outbox_history}} including all);
alter table {{day}} replica identity full;
alter table {{outbox_history}} attach partition {{day}}
	for values from ('FROM 00:00:00+00') to ('UNTIL 00:00:00+00')`

func (s *postgresStore) makeDay(ctx context.Context, tx *sql.Tx, day time.Time) error {
	text := strings.NewReplacer(
		"{{day}}", "{{outbox_history_"+day.Format(dayLayout)+"}}",
		"FROM", day.Format(time.DateOnly), "UNTIL", day.AddDate(0, 0, 1).Format(time.DateOnly),
	).Replace(postgresMakeDay)
	_, err := tx.ExecContext(ctx, s.upkeep.names.Expand(text))
	return err
}
