package relaystore

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/shorttx"
)

// Beat implements [Leases].
func (s *postgres) Beat(ctx context.Context, me Identity, lanes []int, term time.Duration) (map[int]Renewal, error) {
	return scanHeld(s.db.QueryContext(ctx, s.q.Beat,
		me.Owner, me.Name, smallints(lanes), term.Microseconds(), me.Ready, me.Stopping, me.Host, me.Version, me.Problem))
}

// Census implements [Leases].
func (s *postgres) Census(ctx context.Context) ([]Lease, []Worker, error) {
	return scanCensus(s.db.QueryContext(ctx, s.q.Census))
}

// ExpireFormer implements [Leases].
func (s *postgres) ExpireFormer(ctx context.Context, me Identity) error {
	_, err := s.db.ExecContext(ctx, s.q.ExpireFormer, me.Owner, me.Name)
	return err
}

// Expire implements [Leases].
func (s *postgres) Expire(ctx context.Context, leases []Lease, workers []Worker) error {
	lanes, owners, epochs, untils := make([]int, len(leases)), make([]string, len(leases)), make([]int64, len(leases)), make([]int64, len(leases))
	for i, l := range leases {
		lanes[i], owners[i], epochs[i], untils[i] = l.Lane, l.Owner, l.Epoch, l.Until
	}
	names, seen := make([]string, len(workers)), make([]int64, len(workers))
	for i, p := range workers {
		names[i], seen[i] = p.Owner, p.Until
	}
	_, err := s.db.ExecContext(ctx, s.q.Expire,
		smallints(lanes), pq.Array(owners), pq.Array(epochs), pq.Array(untils), pq.Array(names), pq.Array(seen))
	return err
}

// Take implements [Leases].
func (s *postgres) Take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (map[int]Taken, error) {
	return scanTaken(s.db.QueryContext(ctx, s.q.Take, owner, smallints(lanes), most, term.Microseconds()))
}

// Release implements [Leases].
func (s *postgres) Release(ctx context.Context, owner string, epochs map[int]int64, unsure []int) error {
	lanes, numbers := pairs(epochs)
	_, err := s.db.ExecContext(ctx, s.q.Release, owner, lanes, numbers, smallints(unsure))
	return err
}

// Flush implements [Leases]. It commits a change of the worker's own row. Its WAL
// record lies behind the commits of everything that was visible before. Once it is
// durable, they are.
func (s *postgres) Flush(ctx context.Context, owner string) error {
	err := shorttx.Run(ctx, s.db, shorttx.For(shorttx.Idle), func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.q.SetDurable); err != nil {
			return err
		}
		touched, err := tx.ExecContext(ctx, s.q.Touch, owner)
		if err != nil {
			return err
		}
		// A commit that changed nothing waits for nothing. The heartbeat restores the
		// row if it is missing, for example on a restored server.
		n, err := touched.RowsAffected()
		if err == nil && n == 0 {
			err = fmt.Errorf("worker %s is not registered yet", owner)
		}
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, s.q.CommitInFull)
		return err
	})
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return nil
}

// Leave implements [Leases]. The lanes are free though somebody has locked the row of the worker.
func (s *postgres) Leave(ctx context.Context, owner string, sure []int) error {
	if _, err := s.db.ExecContext(ctx, s.q.ReleaseAll, owner, smallints(sure)); err != nil {
		return err
	}
	_, err := s.db.ExecContext(ctx, s.q.Leave, owner)
	return err
}

// Guard implements [Leases].
func (s *postgres) Guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error) {
	var n int
	err := tx.QueryRowContext(ctx, s.q.Guard, lane, owner, epoch).Scan(&n)
	return n == 1, err
}

// SetAlone implements [Leases].
func (s *postgres) SetAlone(ctx context.Context, f Fence, id int64) error {
	result, err := s.db.ExecContext(ctx, s.q.SetAlone, f.Lane, f.Owner, f.Epoch, id)
	if err != nil {
		return fmt.Errorf("record the message alone in flight: %w", err)
	}
	return fenced(result)
}

// ClearCrashes implements [Leases].
func (s *postgres) ClearCrashes(ctx context.Context, owner string, epochs map[int]int64) error {
	lanes, numbers := pairs(epochs)
	if _, err := s.db.ExecContext(ctx, s.q.ClearCrashes, owner, lanes, numbers); err != nil {
		return fmt.Errorf("clear crashes: %w", err)
	}
	return nil
}

// pairs returns lanes and their epochs as two arrays.
func pairs(epochs map[int]int64) (lanes, numbers any) {
	ordered := slices.Sorted(maps.Keys(epochs))
	values := make([]int64, len(ordered))
	for i, lane := range ordered {
		values[i] = epochs[lane]
	}
	return smallints(ordered), pq.Array(values)
}
