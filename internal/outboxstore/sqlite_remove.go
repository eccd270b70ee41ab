package outboxstore

import (
	"context"
	"database/sql"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

func (s *sqlite) ByCTID(rows []Ref) (groups [][]Ref, rest []Ref) { return nil, rows }

func (s *sqlite) RemoveAt(context.Context, []Ref, bool) (bool, error) { return false, nil }

// Remove finds no row locked: SQLite locks whole databases, and only briefly. It removes
// the rows in transactions that end when others wait for their turn, so after an error
// some of them may be gone.
func (s *sqlite) Remove(ctx context.Context, rows []Ref, how Removing) (removed int, locked []Ref, err error) {
	texts := []string{s.q.Delete}
	if how.Move {
		texts = []string{s.q.Keep, s.q.Delete}
	}
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		statements := make([]*sql.Stmt, len(texts))
		for i, text := range texts {
			stmt, err := tx.PrepareContext(ctx, text)
			if err != nil {
				return false, err
			}
			defer stmt.Close() //nolint:errcheck // the transaction is over
			statements[i] = stmt
		}
		for ; len(rows) > 0 && !over(); rows = rows[1:] {
			n, err := removeRow(ctx, rows[0], statements)
			if err != nil {
				return false, err
			}
			removed += int(n)
		}
		return len(rows) > 0, nil
	})
	return removed, nil, err
}

// removeRow executes the statements for a row, and returns how many rows the last of
// them has changed.
func removeRow(ctx context.Context, r Ref, statements []*sql.Stmt) (changed int64, err error) {
	for _, stmt := range statements {
		changed, err = database.Affected(stmt.ExecContext(ctx, r.ID, r.Lane, r.MessageID, r.CreatedAt.UnixMicro()))
		if err != nil {
			return 0, err
		}
	}
	return changed, nil
}
