package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

func (s *postgres) NextDue(ctx context.Context, over Passed) (due Due, found bool, err error) {
	var micros int64
	row := s.db.QueryRowContext(ctx, s.q.NextDue, pq.Array(orEmpty(over.Seqs)), pq.Array(orEmpty(over.Keys)), over.UpTo.At, over.UpTo.Seq)
	switch err := row.Scan(&micros, &due.Bytes); {
	case errors.Is(err, sql.ErrNoRows):
		return Due{}, false, nil
	case err != nil:
		return Due{}, false, err
	}
	due.In = dueIn(micros)
	return due, true, nil
}

func (s *postgres) NextLarge(ctx context.Context, over Passed, bytes int64) (size int64, err error) {
	row := s.db.QueryRowContext(ctx, s.q.NextLarge, pq.Array(orEmpty(over.Seqs)), pq.Array(orEmpty(over.Keys)), over.UpTo.At, over.UpTo.Seq, bytes)
	if err := row.Scan(&size); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, err
	}
	return size, nil
}

func (s *postgres) MoveDue(ctx context.Context, guard Guard, limits shorttx.Limits, c Choice) (b Batch, err error) {
	_, err = s.guarded(ctx, limits, guard, func(tx *sql.Tx) (bool, error) {
		if _, err := tx.ExecContext(ctx, s.q.MoveSettings); err != nil {
			return false, err
		}
		if err := s.chooseDue(ctx, tx, c, &b); err != nil || len(b.Chosen) == 0 {
			return false, err
		}
		if c.Singly > 0 {
			return true, s.moveSingly(ctx, tx, c.Singly, &b)
		}
		var err error
		b.Moved, err = s.moveChosen(ctx, tx, b.Chosen)
		return true, rowError(ctx, err)
	})
	if err != nil {
		b.Moved = 0
	}
	return b, err
}

func (s *postgres) chooseDue(ctx context.Context, tx *sql.Tx, c Choice, b *Batch) error {
	var times, keys []string
	var seqs []int64
	row := tx.QueryRowContext(ctx, s.q.ChooseDue, c.Look, c.Bytes, pq.Array(orEmpty(c.Keys)), c.Least, c.Most, pq.Array(orEmpty(c.Seqs)), c.Only,
		c.UpTo.At, c.UpTo.Seq, c.End.At, c.End.Seq, c.Rows)
	if err := row.Scan(pq.Array(&times), pq.Array(&seqs), pq.Array(&keys), pq.Array(&b.Waiting), &b.Last.At, &b.Last.Seq); err != nil {
		return err
	}
	for i := range seqs {
		b.Chosen = append(b.Chosen, Scheduled{Position{times[i], seqs[i]}, keys[i]})
	}
	return nil
}

func (s *postgres) moveChosen(ctx context.Context, tx *sql.Tx, chosen []Scheduled) (moved int, err error) {
	times, seqs := make([]string, len(chosen)), make([]int64, len(chosen))
	for i, c := range chosen {
		times[i], seqs[i] = c.At, c.Seq
	}
	n, err := database.Affected(tx.ExecContext(ctx, s.q.MoveDue, pq.Array(times), pq.Array(seqs)))
	return int(n), err
}

// moveSingly moves chosen messages one by one.
func (s *postgres) moveSingly(ctx context.Context, tx *sql.Tx, limit time.Duration, b *Batch) error {
	if _, err := tx.ExecContext(ctx, s.q.MoveSingly); err != nil {
		return err
	}
	one := singly{savepoint: s.q.Savepoint, release: s.q.Release, rollBack: s.q.RollBack, one: s.moveChosen, rowError: rowError}
	return one.move(ctx, tx, limit, b)
}

// rowError returns err as a [*RowError] if a message may have caused it.
func rowError(ctx context.Context, err error) error {
	state := sqlerr.State(err)
	if ctx.Err() != nil || len(state) != 5 {
		return err
	}
	const tookLong = "57014"
	switch state[:2] {
	case "25", "28", "40", "53", "57": // transaction, role, retries, resources, operators
		if state != tookLong {
			return err
		}
	}
	return &RowError{TookLong: state == tookLong, cause: err}
}
