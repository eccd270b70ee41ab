package relaystore

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/text"
)

// The kinds of rows of the statement retry.
const (
	kindFollower = 0
	kindRetry    = 1
	kindHold     = 2
)

// Fail implements [Retries].
func (s *postgres) Fail(ctx context.Context, f Fence, failures []Failure, followers []outboxstore.Ref) error {
	var fresh, again [3][]Failure // by fate
	var postponed []Failure
	for _, one := range failures {
		switch {
		case one.Retrying && one.Uncharged:
			postponed = append(postponed, one)
		case one.Retrying:
			again[one.Fate] = append(again[one.Fate], one)
		default:
			fresh[one.Fate] = append(fresh[one.Fate], one)
		}
	}
	moved := slices.Concat(fresh[FateRetry], fresh[FateHoldKey])
	kinds := slices.Concat(repeat(kindRetry, len(fresh[FateRetry])), repeat(kindHold, len(fresh[FateHoldKey])), repeat(kindFollower, len(followers)))
	for _, ref := range followers {
		moved = append(moved, Failure{Ref: ref})
	}
	// Each is a separate fenced statement, correct without the others.
	wrote := false
	for _, w := range []struct {
		text string
		rows []Failure
		more []any
	}{
		{s.q.DeadLetter, fresh[FateDeadLetter], nil},
		{s.q.RetryAgain, again[FateRetry], nil},
		{s.q.Postpone, postponed, nil},
		{s.q.DeadLetterRetrying, again[FateDeadLetter], nil},
		{s.q.HoldKey, again[FateHoldKey], nil},
		{s.q.Retry, moved, []any{pq.Array(kinds)}},
	} {
		if len(w.rows) == 0 {
			continue
		}
		if err := s.fenced(ctx, w.text, f, append(failureArgs(w.rows), w.more...)...); err != nil {
			return fmt.Errorf("record failures: %w", err)
		}
		wrote = true
	}
	if !wrote {
		if err := s.fenced(ctx, s.q.Fence, f); err != nil {
			return fmt.Errorf("record failures: %w", err)
		}
	}
	return nil
}

func repeat(kind int64, n int) []int64 { return slices.Repeat([]int64{kind}, n) }

// failureArgs returns the rows as arrays, $4 to $12.
func failureArgs(rows []Failure) []any {
	n := len(rows)
	ids, created, attempts, waits := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	unanswered := make([]bool, n)
	messages, classes, texts, prints := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	for i, r := range rows {
		ids[i], messages[i], created[i] = r.ID, r.MessageID, r.CreatedAt.UnixMicro()
		attempts[i], waits[i] = int64(r.Attempt), r.RetryIn.Microseconds()
		classes[i], texts[i] = text.Clean(r.Class), text.Clean(r.Text)
		prints[i], unanswered[i] = r.Fingerprint, r.Unanswered
	}
	return []any{
		pq.Array(ids), pq.Array(messages), pq.Array(created), pq.Array(attempts),
		pq.Array(classes), pq.Array(texts), pq.Array(waits), pq.Array(prints), pq.Array(unanswered),
	}
}

// Follow implements [Retries].
func (s *postgres) Follow(ctx context.Context, f Fence, keys []string, known []outboxstore.Known, limit int) (moved int, err error) {
	ids, created := knownArrays(known)
	err = s.within(ctx, func(tx *sql.Tx) error {
		var holds int
		if err := tx.QueryRowContext(ctx, s.q.Follow, f.Lane, f.Owner, f.Epoch, pq.Array(keys), limit, ids, created).Scan(&holds, &moved); err != nil {
			return err
		}
		if holds == 0 {
			return ErrFenced
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("move followers: %w", err)
	}
	return moved, nil
}

// CarryOut implements [Retries].
func (s *postgres) CarryOut(ctx context.Context, f Fence, deadLetters []int64) (retrying, ended []Key, err error) {
	for _, text := range []string{s.q.Replay, s.q.Discard} {
		if err := s.fenced(ctx, text, f, pq.Array(deadLetters)); err != nil {
			return nil, nil, fmt.Errorf("carry out commands: %w", err)
		}
	}
	retrying, ended, err = scanKeyStates(s.db.QueryContext(ctx, s.q.DeadLetterKeys, pq.Array(deadLetters)))
	if err != nil {
		return nil, nil, fmt.Errorf("carry out commands: look at the keys: %w", err)
	}
	return retrying, ended, nil
}

// Remove implements [Retries]. It deletes and then gives the next heads their times, in
// one transaction. A writer of a follower without a time locks the head of its key in the
// same statement, so a second statement after the deletion sees each of them. READ
// COMMITTED, which shorttx sets, is needed for that.
func (s *postgres) Remove(ctx context.Context, rows []outboxstore.Ref, move bool) (removal Removal, err error) {
	text := s.q.Remove
	if move {
		text = s.q.RemoveIntoHistory
	}
	rows = slices.SortedFunc(slices.Values(rows), func(a, b outboxstore.Ref) int { return cmp.Compare(a.ID, b.ID) })
	n := len(rows)
	lanes, ids, messages, created := make([]int, n), make([]int64, n), make([]string, n), make([]int64, n)
	for i, r := range rows {
		lanes[i], ids[i], messages[i], created[i] = r.Lane, r.ID, r.MessageID, r.CreatedAt.UnixMicro()
	}
	args := []any{smallints(lanes), pq.Array(ids), pq.Array(messages), pq.Array(created)}
	err = s.within(ctx, func(tx *sql.Tx) error {
		var lanes []int // of keys whose head is gone
		var keys []string
		removal = Removal{}
		gone, err := tx.QueryContext(ctx, text, args...)
		_, err = collect(gone, err, func(row *sql.Rows, k *Key) error {
			var n int
			var first bool
			err := row.Scan(&k.Lane, &k.Key, &n, &first)
			removal.Rows += n
			if k.Key != "" && first {
				lanes, keys = append(lanes, k.Lane), append(keys, k.Key)
			}
			return err
		})
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.q.CloseDeadLetters, args...); err != nil || len(keys) == 0 {
			return err
		}
		removal.Ended, err = scanKeys(tx.QueryContext(ctx, s.q.PromoteHeads, smallints(lanes), pq.Array(keys)))
		return err
	})
	if err != nil {
		return Removal{}, fmt.Errorf("remove retried messages: %w", err)
	}
	return removal, nil
}
