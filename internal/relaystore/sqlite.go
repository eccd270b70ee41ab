package relaystore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

// sqlite is the Store on SQLite. It writes in transactions that are writers from their
// start. There is one writer at a time, so reading the row of the lease is the fence.
type sqlite struct {
	db *sql.DB
	q  struct {
		BeatWorker, BeatLeases, Held, Census, Take, Expire             string
		ExpireWorker, ReleaseAll                                       string
		ExpireFormer, DeleteFormer, Release, Leave, Guard, Fence       string
		SetAlone, ClearAlone, ClearCrashes                             string
		Keys, TopicsDue, Heads, Rows, Find, ReadPiece, Commands        string
		FindOtherTopics, HasKey, FindDeadLetter, RowsOfKeys            string
		Retry, DeadLetter, DeleteFromOutbox, RetryAgain, Postpone      string
		HoldKey, DeadLetterHeld, DeadLetterRetrying                    string
		MarkUnanswered, MarkMaybeDelivered, DeleteRetrying, DeleteHeld string
		SetHeadTime, ClearOtherTimes, Replay, CloseDeadLetter          string
		KeepHistory, CloseDeadLetters, HighestID                       string
		RetryNow, RetryKeyNow                                          string
		Waiting, Owners, Workers                                       string
		Retrying, RetryingTopic, RetryingKey                           string
	}
}

// fenced runs fn in transactions in which the lease is the owner's, like
// [sqlitetx.WriteSlices]. In each of them it then sets the times of the heads of the
// keys that fn has touched.
func (s *sqlite) fenced(ctx context.Context, f Fence, fn func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error)) error {
	return sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		var holds int
		if err := tx.QueryRowContext(ctx, s.q.Fence, f.Lane, f.Owner, f.Epoch).Scan(&holds); err != nil {
			return false, err
		}
		if holds == 0 {
			return false, ErrFenced
		}
		touched := touchedKeys{}
		if more, err = fn(tx, touched, over); err != nil {
			return false, err
		}
		return more, s.fixHeads(ctx, tx, touched)
	})
}

// some handles elements one by one, at least one, until over reports that it is enough,
// and returns the rest. A row may be of any size, so the elapsed time decides how many.
func some[T any](list []T, over func() bool, do func(T) error) (left []T, err error) {
	for i, one := range list {
		if over() {
			return list[i:], nil
		}
		if err := do(one); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// touchedKeys are keys whose rows changed.
type touchedKeys map[Key]bool

func (k touchedKeys) add(lane int, key string) {
	if key != "" {
		k[Key{lane, key}] = true
	}
}

// fixHeads gives the first row of each key a time, unless it has one or is held, and
// removes it from the others.
func (s *sqlite) fixHeads(ctx context.Context, tx *sql.Tx, touched touchedKeys) error {
	for k := range touched {
		for _, text := range []string{s.q.ClearOtherTimes, s.q.SetHeadTime} {
			if _, err := tx.ExecContext(ctx, text, k.Lane, k.Key); err != nil {
				return err
			}
		}
	}
	return nil
}

// keyStates separates the keys that have rows in parked from those that have none.
func (s *sqlite) keyStates(ctx context.Context, tx *sql.Tx, keys touchedKeys) (retrying, ended []Key, err error) {
	for k := range keys {
		var there bool
		if err := tx.QueryRowContext(ctx, s.q.HasKey, k.Lane, k.Key).Scan(&there); err != nil {
			return nil, nil, err
		}
		if there {
			retrying = append(retrying, k)
		} else {
			ended = append(ended, k)
		}
	}
	return retrying, ended, nil
}

// deleteRow executes a delete of one row that returns its key, and adds the key to
// touched.
func (s *sqlite) deleteRow(ctx context.Context, tx *sql.Tx, text string, ref outboxstore.Ref, touched touchedKeys) (did bool, err error) {
	var key string
	err = tx.QueryRowContext(ctx, text, refArgs(ref)...).Scan(&key)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	touched.add(ref.Lane, key)
	return err == nil, err
}

// jsonArray returns a list as the parameter of json_each.
func jsonArray[T int | int64 | string](list []T) string {
	if list == nil {
		list = []T{} // nil would be null
	}
	text, _ := json.Marshal(list) // integers and strings cannot fail
	return string(text)
}

// HighestID implements [Sequences].
func (s *sqlite) HighestID(ctx context.Context) (highest int64, err error) {
	if err := s.db.QueryRowContext(ctx, s.q.HighestID).Scan(&highest); err != nil {
		return 0, fmt.Errorf("look for the highest id in use: %w", err)
	}
	return highest, nil
}

// DeadLettersBehind implements [Sequences].
func (s *sqlite) DeadLettersBehind(context.Context) (bool, error) { return false, nil }

// RepairDeadLetters implements [Sequences].
func (s *sqlite) RepairDeadLetters(context.Context) error { return nil }
