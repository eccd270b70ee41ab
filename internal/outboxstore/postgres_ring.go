package outboxstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/oncemill/oncemill/internal/shorttx"
)

func (s *postgres) Ring(ctx context.Context) (ring Ring, err error) {
	rows, err := s.db.QueryContext(ctx, s.q.Ring)
	if err != nil {
		return Ring{}, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var p Partition
		if err := rows.Scan(&ring.Last, &p.Bytes, &p.PassedOver); err != nil {
			return Ring{}, err
		}
		ring.Partitions = append(ring.Partitions, p)
	}
	return ring, rows.Err()
}

func (s *postgres) HasStandby(ctx context.Context) (standby bool, err error) {
	err = s.db.QueryRowContext(ctx, s.q.HasStandby).Scan(&standby)
	return standby, err
}

func (s *postgres) TruncatePartition(ctx context.Context, guard Guard, limits shorttx.Limits, i int) (bool, error) {
	return s.guarded(ctx, limits, guard, func(tx *sql.Tx) (bool, error) {
		return ifEmpty(ctx, tx, s.q.PartitionEmpty[i], s.q.LockPartitionWriters[i], s.q.LockPartition[i], s.q.TruncatePartition[i])
	})
}

// ifEmpty executes text, which empties or drops a partition, if the partition has only
// dead rows. See the statement partition_empty.
func ifEmpty(ctx context.Context, tx *sql.Tx, emptyText, lockWriters, lock, text string) (bool, error) {
	empty := func() (empty bool, err error) {
		err = tx.QueryRowContext(ctx, emptyText).Scan(&empty)
		return empty, err
	}
	if ok, err := empty(); err != nil || !ok {
		return false, err
	}
	if _, err := tx.ExecContext(ctx, lockWriters); err != nil {
		return false, err
	}
	if ok, err := empty(); err != nil || !ok {
		return false, err
	}
	if _, err := tx.ExecContext(ctx, lock); err != nil {
		return false, err
	}
	_, err := tx.ExecContext(ctx, text)
	return err == nil, err
}

func (s *postgres) PartitionLockers(ctx context.Context, i int) (lockers []string, err error) {
	rows, err := s.db.QueryContext(ctx, s.q.Lockers[i])
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var l string
		if err := rows.Scan(&l); err != nil {
			return nil, err
		}
		lockers = append(lockers, l)
	}
	return lockers, rows.Err()
}

// It takes about 20 ms and no lock. Ids taken stay taken if it is interrupted.
var advanceLimits = shorttx.Limits{Lock: time.Second, Statement: 2 * time.Second}

func (s *postgres) AdvanceIDs(ctx context.Context, guard Guard) (bool, error) {
	return s.guarded(ctx, advanceLimits, guard, func(tx *sql.Tx) (bool, error) {
		_, err := tx.ExecContext(ctx, s.q.AdvanceIDs)
		return true, err
	})
}

func (s *postgres) OldestSnapshot(ctx context.Context) (*Holder, error) {
	oldest, err := scanHolders(s.db.QueryContext(ctx, s.q.OldestSnapshots))
	if err != nil || len(oldest) == 0 {
		return nil, err
	}
	return &oldest[0], nil
}

func (s *postgres) RingLockers(ctx context.Context) ([]Holder, error) {
	return scanHolders(s.db.QueryContext(ctx, s.q.RingLockers))
}

func scanHolders(rows *sql.Rows, err error) ([]Holder, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	var out []Holder
	for rows.Next() {
		var h Holder
		var micros int64
		if err := rows.Scan(&h.Kind, &h.PID, &h.Application, &h.State, &micros); err != nil {
			return nil, err
		}
		h.Age = time.Duration(micros) * time.Microsecond
		out = append(out, h)
	}
	return out, rows.Err()
}
