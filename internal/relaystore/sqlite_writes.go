package relaystore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/text"
)

// Fail implements [Retries].
func (s *sqlite) Fail(ctx context.Context, f Fence, failures []Failure, followers []outboxstore.Ref) error {
	err := s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		failures, err = some(failures, over, func(one Failure) error { return s.failOne(ctx, tx, f, one, touched) })
		if err != nil || len(failures) > 0 {
			return true, err
		}
		followers, err = some(followers, over, func(ref outboxstore.Ref) error {
			ref.Lane = f.Lane
			return s.followOne(ctx, tx, ref, touched)
		})
		return len(followers) > 0, err
	})
	if err != nil {
		return fmt.Errorf("record failures: %w", err)
	}
	return nil
}

func (s *sqlite) failOne(ctx context.Context, tx *sql.Tx, f Fence, one Failure, touched touchedKeys) error {
	one.Lane, one.Class, one.Text = f.Lane, text.Clean(one.Class), text.Clean(one.Text)
	write := s.failInOutbox
	if one.Retrying {
		write = s.failAgain
	}
	if err := write(ctx, tx, one, touched); err != nil {
		return err
	}
	if one.Unanswered {
		for _, text := range []string{s.q.MarkUnanswered, s.q.MarkMaybeDelivered} {
			if _, err := tx.ExecContext(ctx, text, refArgs(one.Ref)...); err != nil {
				return err
			}
		}
	}
	_, err := tx.ExecContext(ctx, s.q.ClearAlone, f.Lane, one.ID)
	return err
}

// failInOutbox moves a row of the outbox. The copies of a row that is gone are none.
func (s *sqlite) failInOutbox(ctx context.Context, tx *sql.Tx, one Failure, touched touchedKeys) error {
	held := one.Fate == FateHoldKey
	if one.Fate != FateDeadLetter {
		_, err := tx.ExecContext(ctx, s.q.Retry, refArgs(one.Ref, one.Attempt, one.Class, one.Text, one.RetryIn.Microseconds(), held)...)
		if err != nil {
			return err
		}
	}
	if one.Fate != FateRetry {
		state := "dead"
		if held {
			state = "held"
		}
		_, err := tx.ExecContext(ctx, s.q.DeadLetter, refArgs(one.Ref, one.Attempt, one.Class, one.Text, one.Fingerprint, state, held)...)
		if err != nil {
			return err
		}
	}
	_, err := s.deleteRow(ctx, tx, s.q.DeleteFromOutbox, one.Ref, touched)
	return err
}

// Follow implements [Retries].
func (s *sqlite) Follow(ctx context.Context, f Fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error) {
	err = s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		rows, err := tx.QueryContext(ctx, s.q.RowsOfKeys, f.Lane, jsonArray(keys), min(limit, sqliteSweepRows)+len(known))
		if err != nil {
			return false, err
		}
		var refs []outboxstore.Ref
		err = each(rows, func(row *sql.Rows) (bool, error) {
			ref, created := outboxstore.Ref{Lane: f.Lane}, int64(0)
			err := row.Scan(&ref.ID, &ref.MessageID, &created)
			ref.CreatedAt = time.UnixMicro(created).UTC()
			if !slices.Contains(known, ref.Known()) {
				refs = append(refs, ref)
			}
			return len(refs) < min(limit, sqliteSweepRows), err
		})
		if err != nil {
			return false, err
		}
		left, err := some(refs, over, func(ref outboxstore.Ref) error { return s.followOne(ctx, tx, ref, touched) })
		moved = len(refs) - len(left)
		if len(left) > 0 || moved == sqliteSweepRows {
			moved = limit // there may be more
		}
		return false, err
	})
	if err != nil {
		return 0, fmt.Errorf("move followers: %w", err)
	}
	return moved, nil
}

// sqliteSweepRows bounds what Follow moves at a time, so that the writer's turn is short.
const sqliteSweepRows = 500

// followOne moves a row of the outbox behind those of its key. A head gets its time from
// fixHeads.
func (s *sqlite) followOne(ctx context.Context, tx *sql.Tx, ref outboxstore.Ref, touched touchedKeys) error {
	if _, err := tx.ExecContext(ctx, s.q.Retry, refArgs(ref, 0, "", "", nil, false)...); err != nil {
		return err
	}
	_, err := s.deleteRow(ctx, tx, s.q.DeleteFromOutbox, ref, touched)
	return err
}

// failAgain records a failure of a row in parked.
func (s *sqlite) failAgain(ctx context.Context, tx *sql.Tx, one Failure, touched touchedKeys) error {
	exec := func(text string, more ...any) (bool, error) {
		n, err := database.Affected(tx.ExecContext(ctx, text, refArgs(one.Ref, append([]any{one.Attempt, one.Class, one.Text}, more...)...)...))
		return n > 0, err
	}
	switch one.Fate {
	case FateRetry:
		text := s.q.RetryAgain
		if one.Uncharged {
			text = s.q.Postpone
		}
		_, err := exec(text, one.RetryIn.Microseconds())
		return err
	case FateHoldKey:
		if did, err := exec(s.q.HoldKey); err != nil || !did {
			return err
		}
		_, err := exec(s.q.DeadLetterHeld, one.Fingerprint)
		return err
	case FateDeadLetter:
		if did, err := exec(s.q.DeadLetterRetrying, one.Fingerprint); err != nil || !did {
			return err
		}
		_, err := s.deleteRow(ctx, tx, s.q.DeleteRetrying, one.Ref, touched)
		return err
	}
	return nil
}

// CarryOut implements [Retries].
func (s *sqlite) CarryOut(ctx context.Context, f Fence, deadLetters []int64) (retrying, ended []Key, err error) {
	all := touchedKeys{}
	err = s.fenced(ctx, f, func(tx *sql.Tx, touched touchedKeys, over func() bool) (more bool, err error) {
		deadLetters, err = some(deadLetters, over, func(id int64) error { return s.carryOutOne(ctx, tx, f.Lane, id, touched) })
		maps.Copy(all, touched)
		if err == nil && len(deadLetters) == 0 {
			retrying, ended, err = s.keyStates(ctx, tx, all)
		}
		return len(deadLetters) > 0, err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("carry out commands: %w", err)
	}
	return retrying, ended, nil
}

func (s *sqlite) carryOutOne(ctx context.Context, tx *sql.Tx, lane int, id int64, touched touchedKeys) error {
	var state, key string
	var created int64
	ref := outboxstore.Ref{Lane: lane}
	err := tx.QueryRowContext(ctx, s.q.FindDeadLetter, id, lane).Scan(&state, &key, &ref.ID, &ref.MessageID, &created)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	touched.add(lane, key)
	ref.CreatedAt = time.UnixMicro(created)
	var end string
	switch state {
	case "replaying":
		end = "replayed"
		if _, err := tx.ExecContext(ctx, s.q.Replay, id); err != nil {
			return err
		}
	case "discarding":
		end = "discarded"
		if _, err := s.deleteRow(ctx, tx, s.q.DeleteHeld, ref, touched); err != nil {
			return err
		}
	default:
		return nil // carried out already
	}
	_, err = tx.ExecContext(ctx, s.q.CloseDeadLetter, id, end)
	return err
}

// Remove implements [Retries].
func (s *sqlite) Remove(ctx context.Context, rows []outboxstore.Ref, move bool) (removal Removal, err error) {
	var slice Removal // what the running transaction removes
	add := func() {
		removal.Rows += slice.Rows
		removal.Ended = append(removal.Ended, slice.Ended...)
		slice = Removal{}
	}
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		add() // the one before has committed
		touched := touchedKeys{}
		rows, err = some(rows, over, func(ref outboxstore.Ref) error {
			did, err := s.removeOne(ctx, tx, ref, move, touched)
			if did {
				slice.Rows++
			}
			return err
		})
		if err == nil {
			err = s.fixHeads(ctx, tx, touched)
		}
		if err == nil {
			_, slice.Ended, err = s.keyStates(ctx, tx, touched)
		}
		return len(rows) > 0, err
	})
	if err != nil {
		return removal, fmt.Errorf("remove retried messages: %w", err)
	}
	add()
	return removal, nil
}

// removeOne deletes a confirmed row, if it exists.
func (s *sqlite) removeOne(ctx context.Context, tx *sql.Tx, ref outboxstore.Ref, move bool, touched touchedKeys) (did bool, err error) {
	if move {
		if _, err := tx.ExecContext(ctx, s.q.KeepHistory, refArgs(ref)...); err != nil {
			return false, err
		}
	}
	if did, err = s.deleteRow(ctx, tx, s.q.DeleteRetrying, ref, touched); err != nil {
		return false, err
	}
	_, err = tx.ExecContext(ctx, s.q.CloseDeadLetters, refArgs(ref)...)
	return did, err
}
