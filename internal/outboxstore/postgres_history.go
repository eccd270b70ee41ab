package outboxstore

import (
	"context"
	"database/sql"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

func (s *postgres) Now(ctx context.Context) (now time.Time, err error) {
	err = s.db.QueryRowContext(ctx, s.q.Now).Scan(&now)
	return now, err
}

func (s *postgres) ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error) {
	args := append(historyArgs(f), f.After.ID, timeOrNull(f.After.RelayedAt), f.Limit, f.Brief)
	return scanHistory(s.db.QueryContext(ctx, s.q.ListHistory, args...))
}

func (s *postgres) CountHistory(ctx context.Context, f HistoryFilter) (n int, err error) {
	err = s.db.QueryRowContext(ctx, s.q.CountHistory, historyArgs(f)...).Scan(&n)
	return n, err
}

func (s *postgres) Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error) {
	return database.Affected(tx.ExecContext(ctx, s.q.Resend, append(historyArgs(f), f.Limit)...))
}

// historyArgs are the parameters of the conditions.
func historyArgs(f HistoryFilter) []any {
	args := []any{nil, nil, f.Key, f.Topic, timeOrNull(f.From), timeOrNull(f.To)}
	if len(f.IDs) > 0 {
		args[0] = pq.Array(f.IDs)
	}
	if len(f.MessageIDs) > 0 {
		args[1] = pq.Array(f.MessageIDs)
	}
	return args
}

func timeOrNull(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t
}

const (
	dayLayout      = "20060102"
	undefinedTable = "42P01"
)

var (
	// Creating a day takes no lock that a move or a reader waits for.
	addDayLimits = shorttx.Limits{Lock: 2 * time.Second, Statement: 4 * time.Second}

	// Others queue behind the lock that a truncate or a drop waits for.
	retireLimits = shorttx.Limits{Lock: 10 * time.Millisecond, Statement: 250 * time.Millisecond}

	archiveLimits = shorttx.Limits{Lock: time.Second, Statement: 4 * time.Second}
)

// historyDays returns the server's time (UTC), and the days that have a partition, with
// whether the partition has any rows.
func (s *postgres) historyDays(ctx context.Context) (now time.Time, days map[string]bool, err error) {
	rows, err := s.db.QueryContext(ctx, s.q.Days)
	if err != nil {
		return now, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	days = map[string]bool{}
	for rows.Next() {
		var name string
		var filled bool
		if err := rows.Scan(&now, &name, &filled); err != nil {
			return now, nil, err
		}
		if name != "" {
			days[name] = filled
		}
	}
	return now.UTC(), days, rows.Err()
}

func (s *postgres) HistoryDays(ctx context.Context, ahead int) (missing []string, days []Day, err error) {
	now, filled, err := s.historyDays(ctx)
	if err != nil {
		return nil, nil, err
	}
	today := now.Truncate(24 * time.Hour)
	for i := range ahead + 1 {
		name := today.AddDate(0, 0, i).Format(dayLayout)
		if _, exists := filled[name]; !exists {
			missing = append(missing, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(filled)) {
		if day, err := time.Parse(dayLayout, name); err == nil { // or it is not one of ours
			days = append(days, Day{Name: name, Filled: filled[name], Past: past(now, day)})
		}
	}
	return missing, days, nil
}

// past returns the time since the end of a day.
func past(now, day time.Time) time.Duration { return now.Sub(day.AddDate(0, 0, 1)) }

func (s *postgres) AddHistoryDay(ctx context.Context, guard Guard, day string) (bool, error) {
	return s.guarded(ctx, addDayLimits, guard, func(tx *sql.Tx) (bool, error) {
		if exists, err := s.lockedDay(ctx, tx, day); err != nil || exists {
			return false, err
		}
		_, err := tx.ExecContext(ctx, s.q.AddDay(day))
		return true, err
	})
}

func (s *postgres) RetireHistoryDay(ctx context.Context, guard Guard, day string, how Retiring) (bool, error) {
	text := s.q.TruncateDay(day)
	if how.Drop {
		text = s.q.DropDay(day)
	}
	return s.guarded(ctx, retireLimits, guard, func(tx *sql.Tx) (bool, error) {
		if exists, err := s.lockedDay(ctx, tx, day); err != nil || !exists {
			return false, err
		}
		if how.Empty {
			return ifEmpty(ctx, tx, s.q.DayEmpty(day), s.q.LockDayWriters(day), s.q.LockDay(day), text)
		}
		_, err := tx.ExecContext(ctx, text)
		return true, err
	})
}

// lockedDay locks the history against other upkeep, then reports whether a day has a
// partition.
func (s *postgres) lockedDay(ctx context.Context, tx *sql.Tx, day string) (exists bool, err error) {
	if _, err := tx.ExecContext(ctx, s.q.LockHistory); err != nil {
		return false, err
	}
	err = tx.QueryRowContext(ctx, s.q.HasDay(day)).Scan(&exists)
	return exists, err
}

func (s *postgres) PurgeHistory(context.Context, Guard, time.Duration) (int64, error) { return 0, nil }

func (s *postgres) Expired(ctx context.Context, guard Guard, behind Expired, limits ExpiredLimits) (Expired, error) {
	now, days, err := s.historyDays(ctx)
	if err != nil {
		return Expired{}, err
	}
	for _, name := range slices.Sorted(maps.Keys(days)) {
		day, err := time.Parse(dayLayout, name)
		if err != nil || !days[name] || past(now, day) <= limits.Retention || name < behind.day {
			continue // not one of ours, empty, still kept, or done
		}
		after := int64(math.MinInt64)
		if name == behind.day {
			after = behind.Rows[len(behind.Rows)-1].ID
		}
		rows, err := scanHistory(s.db.QueryContext(ctx, s.q.ArchiveRead(name), after, limits.Rows, limits.Bytes))
		if sqlerr.State(err) == undefinedTable {
			continue // it has become empty, and was removed
		}
		if err != nil {
			return Expired{}, err
		}
		if len(rows) == 0 {
			continue
		}
		held, err := s.guarded(ctx, archiveLimits, guard, func(*sql.Tx) (bool, error) { return true, nil })
		if err != nil || !held {
			return Expired{}, err
		}
		return Expired{Rows: rows, day: name}, nil
	}
	return Expired{}, nil
}

func (s *postgres) DeleteExpired(ctx context.Context, guard Guard, batch Expired) (bool, error) {
	return s.guarded(ctx, archiveLimits, guard, func(tx *sql.Tx) (bool, error) {
		_, err := tx.ExecContext(ctx, s.q.ArchiveDelete(batch.day), archivedArgs(batch.Rows)...)
		return true, err
	})
}

func archivedArgs(rows []HistoryRow) []any {
	ids, messageIDs, times := make([]int64, len(rows)), make([]string, len(rows)), make([]int64, len(rows))
	for i, r := range rows {
		ids[i], messageIDs[i], times[i] = r.ID, r.MessageID, r.RelayedAt.UnixMicro()
	}
	return []any{pq.Array(ids), pq.Array(messageIDs), pq.Array(times)}
}
