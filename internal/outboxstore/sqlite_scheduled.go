package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"strconv"

	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

func (s *sqlite) NextDue(ctx context.Context, over Passed) (due Due, found bool, err error) {
	seqs, keys, err := over.lists()
	if err != nil {
		return Due{}, false, err
	}
	var micros int64
	switch err := s.db.QueryRowContext(ctx, s.q.NextDue, seqs, keys, over.UpTo.micros(), over.UpTo.Seq).Scan(&micros); {
	case errors.Is(err, sql.ErrNoRows):
		return Due{}, false, nil
	case err != nil:
		return Due{}, false, err
	}
	return Due{In: dueIn(micros)}, true, nil
}

func (s *sqlite) NextLarge(context.Context, Passed, int64) (int64, error) { return 0, nil }

// MoveDue moves a few rows at a time, until others wait for their turn to write, nothing
// is due, or there are enough. A row's size does not matter.
func (s *sqlite) MoveDue(ctx context.Context, guard Guard, _ shorttx.Limits, c Choice) (b Batch, err error) {
	held, err := s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (bool, error) {
		for moved := 0; moved < c.Rows && !over(); moved = b.Moved {
			if err := s.chooseDue(ctx, tx, c, min(c.Rows-moved, sqliteMoveRows), &b); err != nil || len(b.Chosen) == 0 {
				return false, err
			}
			if c.Singly > 0 {
				return false, s.singly().move(ctx, tx, c.Singly, &b)
			}
			n, err := s.moveChosen(ctx, tx, b.Chosen)
			if err != nil {
				return false, sqliteRowError(ctx, err)
			}
			if b.Moved += n; n < sqliteMoveRows {
				break
			}
		}
		return false, nil // the caller calls again
	})
	if err != nil || !held {
		b.Moved, b.Refused = 0, nil
	}
	return b, err
}

// sqliteMoveRows is how many rows a statement moves.
const sqliteMoveRows = 200

func (s *sqlite) singly() singly {
	return singly{savepoint: s.q.Savepoint, release: s.q.Release, rollBack: s.q.RollBack, one: s.moveChosen, rowError: sqliteRowError}
}

func (s *sqlite) moveChosen(ctx context.Context, tx *sql.Tx, chosen []Scheduled) (moved int, err error) {
	numbers := make([]int64, len(chosen))
	for i, c := range chosen {
		numbers[i] = c.Seq
	}
	seqs, err := list(numbers)
	if err != nil {
		return 0, err
	}
	for _, text := range []string{s.q.CopyDue, s.q.DeleteDue} {
		if _, err := tx.ExecContext(ctx, text, seqs); err != nil {
			return 0, err
		}
	}
	return len(chosen), nil
}

// chooseDue chooses the first due rows, as many as a statement takes.
func (s *sqlite) chooseDue(ctx context.Context, tx *sql.Tx, c Choice, most int, b *Batch) (err error) {
	b.Chosen, b.Last = nil, Position{}
	seqs, keys, err := c.lists()
	if err != nil {
		return err
	}
	text, args := s.q.ChooseDue, []any{most, seqs, keys, c.UpTo.micros(), c.UpTo.Seq, c.End.micros(), c.End.Seq}
	if c.Only != 0 {
		text, args = s.q.ChooseOne, []any{c.Only}
	}
	rows, err := tx.QueryContext(ctx, text, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for total := int64(0); total < c.Bytes && rows.Next(); {
		var at, size int64
		var one Scheduled
		if err := rows.Scan(&at, &one.Seq, &one.Key, &size); err != nil {
			return err
		}
		one.At = strconv.FormatInt(at, 10)
		b.Chosen, b.Last = append(b.Chosen, one), one.Position
		total += size
	}
	return rows.Err()
}

// lists returns what is passed over, as JSON.
func (p Passed) lists() (seqs, keys string, err error) {
	if seqs, err = list(p.Seqs); err != nil {
		return "", "", err
	}
	keys, err = list(p.Keys)
	return seqs, keys, err
}

// micros returns the time of a position as SQLite stores it.
func (p Position) micros() int64 {
	switch micros, err := strconv.ParseInt(p.At, 10, 64); {
	case err == nil:
		return micros
	case p.At == End.At:
		return math.MaxInt64
	}
	return math.MinInt64
}

// sqliteRowError returns err as a [*RowError] if a message may have caused it: a constraint
// or a trigger has refused it.
func sqliteRowError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || !sqlerr.Unacceptable(err) {
		return err
	}
	return &RowError{cause: err}
}
