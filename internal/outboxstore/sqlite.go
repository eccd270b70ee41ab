package outboxstore

import (
	"context"
	"database/sql"
	"encoding/json"

	"github.com/oncemill/oncemill/internal/names"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/statements"
	"github.com/oncemill/oncemill/internal/turn"
)

type sqlite struct {
	writer
	q sqliteStatements
}

// sqliteStatements are the statements in sqlite/*.sql.
type sqliteStatements struct {
	Insert, Schedule, Cancel                      string
	Read, ReadPiece, ReadAhead                    string
	Keep, Delete                                  string
	NextDue, ChooseDue, ChooseOne                 string
	CopyDue, DeleteDue                            string
	Savepoint, Release, RollBack                  string
	Now, ListHistory, CountHistory, Resend        string
	HasExpired, Purge, ArchiveRead, ArchiveDelete string
	CheckSequence, Forged, LastID, RepairedID     string
	DeleteSequence, InsertSequence                string
	Backlog, BacklogScheduled, ListWaiting        string
}

func newSQLite(db *sql.DB, tables names.Names) *sqlite {
	s := &sqlite{}
	statements.Load(&s.q, statementFiles, "sqlite", tables)
	s.writer = writer{
		db: db, insert: s.q.Insert, schedule: s.q.Schedule, cancel: s.q.Cancel,
		mostRows: 100, mostScheduled: 100, // in process: a statement costs no round trip, and binding is quadratic
	}
	return s
}

// guarded runs fn like [sqlitetx.WriteSlices], in transactions that the caller's lease
// guards, and reports whether the lease was held.
func (s *sqlite) guarded(ctx context.Context, guard Guard, fn func(tx *sql.Tx, over func() bool) (more bool, err error)) (held bool, err error) {
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		if held, err = guard(ctx, tx); err != nil || !held {
			return false, err
		}
		return fn(tx, over)
	})
	return held && err == nil, err
}

// list returns a list as JSON.
func list[T any](elements []T) (string, error) {
	text, err := json.Marshal(orEmpty(elements))
	return string(text), err
}

func (s *sqlite) Channel() string { return "" }

func (s *sqlite) Notify(context.Context) error { return nil }

func (s *sqlite) Sequence(ctx context.Context) (q Sequence, err error) {
	err = s.db.QueryRowContext(ctx, s.q.CheckSequence).Scan(&q.Last, &q.Highest)
	return q, err
}

func (s *sqlite) Forged(ctx context.Context) ([]Ref, error) {
	return scanForged(s.db.QueryContext(ctx, s.q.Forged))
}

func (s *sqlite) LastID(ctx context.Context) (last int64, err error) {
	err = s.db.QueryRowContext(ctx, s.q.LastID).Scan(&last)
	return last, err
}

func (s *sqlite) RepairSequence(ctx context.Context, floor int64) (last int64, err error) {
	err = sqlitetx.Write(ctx, s.db, turn.Caller, func(tx *sql.Tx) error {
		if err := tx.QueryRowContext(ctx, s.q.RepairedID, floor).Scan(&last); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.q.DeleteSequence); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, s.q.InsertSequence, last)
		return err
	})
	return last, err
}

// SQLite has no partitions: one file holds everything, and a reader only keeps its log
// large.

func (s *sqlite) Ring(context.Context) (Ring, error) { return Ring{}, nil }

func (s *sqlite) HasStandby(context.Context) (bool, error) { return false, nil }

func (s *sqlite) TruncatePartition(context.Context, Guard, shorttx.Limits, int) (bool, error) {
	return false, nil
}

func (s *sqlite) PartitionLockers(context.Context, int) ([]string, error) { return nil, nil }

func (s *sqlite) AdvanceIDs(context.Context, Guard) (bool, error) { return false, nil }

func (s *sqlite) OldestSnapshot(context.Context) (*Holder, error) { return nil, nil } //nolint:nilnil // there is none

func (s *sqlite) RingLockers(context.Context) ([]Holder, error) { return nil, nil }

func (s *sqlite) HistoryDays(context.Context, int) ([]string, []Day, error) { return nil, nil, nil }

func (s *sqlite) AddHistoryDay(context.Context, Guard, string) (bool, error) { return false, nil }

func (s *sqlite) RetireHistoryDay(context.Context, Guard, string, Retiring) (bool, error) {
	return false, nil
}
