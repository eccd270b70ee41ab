package relaystore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/shorttx"
)

// postgres is the Store on PostgreSQL.
type postgres struct {
	db *sql.DB
	q  struct {
		Beat, Census, Take, Expire, ExpireFormer, Release, ReleaseAll, Leave string
		SetDurable, Touch, CommitInFull, Guard, Fence                        string
		SetAlone, ClearCrashes                                               string
		Keys, TopicsDue, Due, ReadPiece, Find, Commands, DeadLetterKeys      string
		FindOtherTopics                                                      string
		Retry, RetryAgain, Postpone, DeadLetter, DeadLetterRetrying          string
		HoldKey, Follow, Replay, Discard                                     string
		Remove, RemoveIntoHistory, CloseDeadLetters, PromoteHeads            string
		HighestID, DeadLettersBehind, LockDeadLetters, RepairDeadLetters     string
		RetryNow, RetryKeyNow                                                string
		Waiting, Owners, Workers                                             string
		Retrying, RetryingTopic, RetryingKey                                 string
	}
}

// within runs fn in a transaction with limits. A read is limited, too: a lock that
// somebody holds on the table must produce an answer, so that it is not taken for a dead
// connection.
func (s *postgres) within(ctx context.Context, fn func(tx *sql.Tx) error) error {
	return shorttx.Run(ctx, s.db, shorttx.Within(ctx), fn)
}

// fenced executes a statement that begins with the fence, and returns ErrFenced if the
// lease did not match.
func (s *postgres) fenced(ctx context.Context, text string, f Fence, args ...any) error {
	return s.within(ctx, func(tx *sql.Tx) error {
		var holds int
		if err := tx.QueryRowContext(ctx, text, append([]any{f.Lane, f.Owner, f.Epoch}, args...)...).Scan(&holds); err != nil {
			return err
		}
		if holds == 0 {
			return ErrFenced
		}
		return nil
	})
}

func smallints(lanes []int) any {
	a := make([]int64, len(lanes))
	for i, l := range lanes {
		a[i] = int64(l)
	}
	return pq.Array(a)
}

func knownArrays(known []outboxstore.Known) (ids, created any) {
	numbers, times := make([]int64, len(known)), make([]int64, len(known))
	for i, k := range known {
		numbers[i], times[i] = k.ID, k.CreatedAt.UnixMicro()
	}
	return pq.Array(numbers), pq.Array(times)
}

// HighestID implements [Sequences].
func (s *postgres) HighestID(ctx context.Context) (highest int64, err error) {
	if err := s.db.QueryRowContext(ctx, s.q.HighestID).Scan(&highest); err != nil {
		return 0, fmt.Errorf("look for the highest id in use: %w", err)
	}
	return highest, nil
}

// DeadLettersBehind implements [Sequences].
func (s *postgres) DeadLettersBehind(ctx context.Context) (behind bool, err error) {
	if err := s.db.QueryRowContext(ctx, s.q.DeadLettersBehind).Scan(&behind); err != nil {
		return false, fmt.Errorf("check id sequence of dead letters: %w", err)
	}
	return behind, nil
}

// RepairDeadLetters implements [Sequences].
func (s *postgres) RepairDeadLetters(ctx context.Context) error {
	err := shorttx.Run(ctx, s.db, shorttx.Repair, func(tx *sql.Tx) error {
		for _, text := range []string{s.q.LockDeadLetters, s.q.RepairDeadLetters} { // the highest id is that after the lock
			if _, err := tx.ExecContext(ctx, text); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("repair sequence of dead letters: %w", err)
	}
	return nil
}
