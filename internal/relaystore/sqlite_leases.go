package relaystore

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// Beat implements [Leases]. It is one transaction, like everything here that writes: it
// waits only for the transaction that writes now.
func (s *sqlite) Beat(ctx context.Context, me Identity, lanes []int, term time.Duration) (held map[int]Renewal, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.q.BeatWorker, me.Owner, me.Name, term.Microseconds(), me.Ready, me.Stopping, me.Host, me.Version, me.Problem); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.q.BeatLeases, me.Owner, jsonArray(lanes), term.Microseconds()); err != nil {
			return err
		}
		held, err = scanHeld(tx.QueryContext(ctx, s.q.Held, me.Owner, jsonArray(lanes)))
		return err
	})
	if err != nil {
		return nil, err
	}
	return held, nil
}

// write runs fn in a transaction ahead of all others that wait.
func (s *sqlite) write(ctx context.Context, fn func(tx *sql.Tx) error) error {
	return sqlitetx.Write(ctx, s.db, turn.Heartbeat, fn)
}

// Census implements [Leases].
func (s *sqlite) Census(ctx context.Context) ([]Lease, []Worker, error) {
	return scanCensus(s.db.QueryContext(ctx, s.q.Census))
}

// ExpireFormer implements [Leases].
func (s *sqlite) ExpireFormer(ctx context.Context, me Identity) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, text := range []string{s.q.ExpireFormer, s.q.DeleteFormer} {
			if _, err := tx.ExecContext(ctx, text, me.Owner, me.Name); err != nil {
				return err
			}
		}
		return nil
	})
}

// Expire implements [Leases].
func (s *sqlite) Expire(ctx context.Context, leases []Lease, workers []Worker) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, p := range workers {
			if _, err := tx.ExecContext(ctx, s.q.ExpireWorker, p.Owner, p.Until); err != nil {
				return err
			}
		}
		for _, l := range leases {
			if _, err := tx.ExecContext(ctx, s.q.Expire, l.Lane, l.Owner, l.Epoch, l.Until); err != nil {
				return err
			}
		}
		return nil
	})
}

// Take implements [Leases].
func (s *sqlite) Take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (leases map[int]Taken, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		leases, err = scanTaken(tx.QueryContext(ctx, s.q.Take, owner, jsonArray(lanes), most, term.Microseconds()))
		return err
	})
	if err != nil {
		return nil, err
	}
	return leases, nil
}

// Release implements [Leases].
func (s *sqlite) Release(ctx context.Context, owner string, epochs map[int]int64, unsure []int) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for lane, epoch := range epochs {
			if _, err := tx.ExecContext(ctx, s.q.Release, owner, lane, epoch, slices.Contains(unsure, lane)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Flush implements [Leases]. It has nothing to do: with synchronous=FULL a commit is
// durable when it is visible.
func (s *sqlite) Flush(context.Context, string) error { return nil }

// Leave implements [Leases].
func (s *sqlite) Leave(ctx context.Context, owner string, sure []int) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.q.ReleaseAll, owner, jsonArray(sure)); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, s.q.Leave, owner)
		return err
	})
}

// Guard implements [Leases].
func (s *sqlite) Guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error) {
	n, err := database.Affected(tx.ExecContext(ctx, s.q.Guard, lane, owner, epoch))
	return n == 1, err
}

// SetAlone implements [Leases].
func (s *sqlite) SetAlone(ctx context.Context, f Fence, id int64) error {
	return sqlitetx.Write(ctx, s.db, turn.Background, func(tx *sql.Tx) error {
		result, err := tx.ExecContext(ctx, s.q.SetAlone, f.Lane, f.Owner, f.Epoch, id)
		if err != nil {
			return fmt.Errorf("record the message alone in flight: %w", err)
		}
		return fenced(result)
	})
}

// ClearCrashes implements [Leases].
func (s *sqlite) ClearCrashes(ctx context.Context, owner string, epochs map[int]int64) error {
	err := sqlitetx.Write(ctx, s.db, turn.Background, func(tx *sql.Tx) error {
		for lane, epoch := range epochs {
			if _, err := tx.ExecContext(ctx, s.q.ClearCrashes, owner, lane, epoch); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("clear crashes: %w", err)
	}
	return nil
}
