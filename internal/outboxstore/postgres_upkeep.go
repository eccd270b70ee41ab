package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgresUpkeep keeps the ring free of dead rows and maintains the daily partitions of
// the history.
type postgresUpkeep struct {
	names     database.Database
	partition [4]string
	ringState string
	standby   string
	days      string
	lockDays  string
	dayThere  string
	blocked   string
	holders   [4]string
	turn      string
}

func newPostgresUpkeep(names database.Database) postgresUpkeep {
	u := postgresUpkeep{
		names: names, ringState: names.Expand(postgresRingState), standby: postgresStandby, days: names.Expand(postgresDays),
		lockDays: names.Expand(postgresLockHistory), dayThere: names.Expand(postgresDayThere),
		blocked: names.Expand(postgresBlocked), turn: names.Expand(postgresTurn),
	}
	for i := range u.partition {
		u.partition[i] = names.Table(fmt.Sprintf("outbox_%d", i))
		u.holders[i] = names.Expand(strings.ReplaceAll(postgresHolders, "{{partition}}", fmt.Sprintf("{{outbox_%d}}", i)))
	}
	return u
}

var (
	// Others queue behind the lock that a truncate or a drop waits for.
	retireLimits = shorttx.Limits{Lock: 10 * time.Millisecond, Statement: 250 * time.Millisecond}

	// Creating a day takes no lock that a move or a reader waits for.
	makeDayLimits = shorttx.Limits{Lock: 2 * time.Second, Statement: 4 * time.Second}
)

const (
	// The existing days, as YYYYMMDD. A day that is dropped meanwhile has no size.
	postgresDays = `
select right(c.relname, 8), coalesce(pg_relation_size(c.oid) > 0, false)
from pg_inherits i
join pg_class c on c.oid = i.inhrelid
where i.inhparent = '{{outbox_history}}'::regclass
order by 1`

	// The upkeep excludes other upkeep with it, but no move and no reader. Attaching a
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
	daysAhead = 3
	dayLayout = "20060102"
)

// maintain does each step, whether or not the others succeed.
func (s *postgresStore) Maintain(ctx context.Context, guard Guard) (done Maintained, err error) {
	err = s.maintainRing(ctx, guard, &done)
	if err == nil || !inconclusive(ctx, err) {
		err = errors.Join(err, s.maintainHistory(ctx, guard, &done))
	}
	return done, err
}

// passedOver reports whether an error only means: not now. Somebody holds the partition
// (an open writer, a dump), or looking at it took too long.
func passedOver(err error) bool {
	return sqlerr.TimedOut(err) || sqlerr.Retryable(err)
}

// guarded runs fn in a short transaction of its own that the caller's lease guards, and
// reports whether fn did anything. It is READ COMMITTED. Under a REPEATABLE READ
// default, a test for emptiness after a lock would still use the snapshot before it,
// and a committed row would be destroyed.
func (s *postgresStore) guarded(ctx context.Context, limits shorttx.Limits, guard Guard, fn func(tx *sql.Tx) (did bool, err error)) (did bool, err error) {
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		held, err := guard(ctx, tx)
		if err != nil || !held {
			return err
		}
		did, err = fn(tx)
		return err
	})
	if err != nil {
		return false, err
	}
	return did, nil
}

// maintainHistory creates the partitions of today and the days ahead, and empties those
// past their retention. It drops them a day later, when no reader remembers them. Rows
// to be archived are removed once they have been archived.
func (s *postgresStore) maintainHistory(ctx context.Context, guard Guard, done *Maintained) error {
	now, days, err := s.historyDays(ctx)
	if err != nil {
		return fmt.Errorf("look at the history: %w", err)
	}
	var failed error
	if s.history > 0 {
		if err := s.makeDays(ctx, guard, now, days, done); err != nil {
			failed = fmt.Errorf("make partition of the history: %w", err)
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
		retired, err := s.guarded(ctx, retireLimits, guard, func(tx *sql.Tx) (bool, error) {
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
			return errors.Join(failed, fmt.Errorf("retire partition of the history: %w", err))
		}
	}
	return failed
}

// expiredFor returns how long nothing of a day has had to be kept. Without a history
// that counts from the end of the day.
func (s *postgresStore) expiredFor(now, day time.Time) time.Duration {
	return now.Sub(day.AddDate(0, 0, 1)) - s.history
}

func (s *postgresStore) makeDays(ctx context.Context, guard Guard, now time.Time, days map[string]bool, done *Maintained) error {
	today := now.Truncate(24 * time.Hour)
	for i := range daysAhead + 1 {
		day := today.AddDate(0, 0, i)
		if _, there := days[day.Format(dayLayout)]; there {
			continue
		}
		made, err := s.guarded(ctx, makeDayLimits, guard, func(tx *sql.Tx) (bool, error) {
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

// historyDays returns the server's time (UTC), and the days that have a partition, with
// whether the partition has any rows.
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

// lockedDay locks the history against other upkeep, then reports whether a day has a
// partition.
func (s *postgresStore) lockedDay(ctx context.Context, tx *sql.Tx, name string) (there bool, err error) {
	if _, err := tx.ExecContext(ctx, s.upkeep.lockDays); err != nil {
		return false, err
	}
	err = tx.QueryRowContext(ctx, s.upkeep.dayThere, s.upkeep.dayTable(name)).Scan(&there)
	return there, err
}

// CREATE and ATTACH, unlike CREATE ... PARTITION OF, do not block moves of other
// sessions. There is no key; where a publication for all tables publishes deletions,
// the archive's would fail without an identity.
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
