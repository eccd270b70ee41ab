package outboxstore

import (
	"context"
	"database/sql"
	"iter"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/statements"
)

// writer writes rows, on both databases.
type writer struct {
	db                       *sql.DB
	insert, schedule, cancel string
	mostRows, mostScheduled  int // of a statement
}

// bytesPerInsert bounds the payload and metadata of one statement, since the driver and
// the server hold several copies of it. A single larger message gets a separate
// statement.
const bytesPerInsert = 8 << 20

func (w *writer) Insert(ctx context.Context, tx oncemill.ExecTx, rows []Row) error {
	for chunk := range chunks(rows, w.mostRows, func(r *Row) *Row { return r }) {
		args := make([]any, 0, len(chunk)*6)
		for _, r := range chunk {
			args = append(args, InsertArgs(r)...)
		}
		if _, err := tx.ExecContext(ctx, statements.ForRows(w.insert, len(chunk)), args...); err != nil {
			return err
		}
	}
	return nil
}

// InsertArgs returns the arguments of the statement that PrepareInsert returns.
func InsertArgs(r Row) []any {
	return []any{r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata}
}

func (w *writer) PrepareInsert(ctx context.Context) (*sql.Stmt, error) {
	return w.db.PrepareContext(ctx, w.insert)
}

func (w *writer) Schedule(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow) error {
	for chunk := range chunks(rows, w.mostScheduled, func(r *ScheduledRow) *Row { return &r.Row }) {
		args := make([]any, 0, len(chunk)*8)
		for _, r := range chunk {
			relative := 0
			if r.Relative {
				relative = 1
			}
			args = append(append(args, InsertArgs(r.Row)...), relative, r.Micros)
		}
		if _, err := tx.ExecContext(ctx, statements.ForRows(w.schedule, len(chunk)), args...); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) Cancel(ctx context.Context, tx oncemill.ExecTx, messageID string) (int64, error) {
	return database.Affected(tx.ExecContext(ctx, w.cancel, messageID))
}

// chunks splits rows into the rows of one statement each, in order: at most most rows,
// and at most bytesPerInsert.
func chunks[R any](rows []R, most int, row func(*R) *Row) iter.Seq[[]R] {
	return func(yield func([]R) bool) {
		begin, bytes := 0, 0
		for i := range rows {
			r := row(&rows[i])
			size := len(r.Payload) + len(r.Metadata)
			if i > begin && (i-begin == most || bytes+size > bytesPerInsert) {
				if !yield(rows[begin:i]) {
					return
				}
				begin, bytes = i, 0
			}
			bytes += size
		}
		if begin < len(rows) {
			yield(rows[begin:])
		}
	}
}
