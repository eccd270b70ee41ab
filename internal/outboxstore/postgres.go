package outboxstore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/oncemill/oncemill/internal/names"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/statements"
)

type postgres struct {
	writer
	q       postgresStatements
	channel string
}

// postgresStatements are the statements in postgresql/*.sql.
type postgresStatements struct {
	Insert, Schedule, Cancel, Notify                       string
	Read, Peek, ReadLarge, ReadPiece, ReadAhead            string
	Delete, Move, DeleteUnlocked, MoveUnlocked             string
	DeleteAt, MoveAt                                       [Partitions]string
	NextDue, NextLarge, MoveSettings, ChooseDue, MoveDue   string
	MoveSingly, Savepoint, Release, RollBack               string
	ListHistory, CountHistory, Resend                      string
	Now, Days, LockHistory                                 string
	HasDay, AddDay, TruncateDay, DropDay                   func(day string) string
	DayEmpty, LockDayWriters, LockDay                      func(day string) string
	ArchiveRead, ArchiveDelete                             func(day string) string
	Ring, HasStandby, AdvanceIDs                           string
	Lockers, PartitionEmpty                                [Partitions]string
	LockPartitionWriters, LockPartition, TruncatePartition [Partitions]string
	OldestSnapshots, RingLockers                           string
	CheckSequence, Forged, LastID                          string
	LockWriters, RepairSequence, RepairScheduled           string
	Backlog, BacklogScheduled, Estimate, ListWaiting       string
}

func newPostgres(db *sql.DB, tables names.Names) *postgres {
	const most = 63 // bytes of a channel's name; two that are cut to the same wake each other
	channel := tables.Schema + "." + tables.Prefix + "outbox"
	s := &postgres{channel: channel[:min(len(channel), most)]}
	statements.Load(&s.q, statementFiles, "postgresql", tables)
	s.writer = writer{
		db: db, insert: s.q.Insert, schedule: s.q.Schedule, cancel: s.q.Cancel,
		mostRows: 10_000, mostScheduled: 8_000, // 60,000 and 64,000 of the protocol's 65,535 parameters
	}
	return s
}

// guarded runs fn in a short transaction that the caller's lease guards, and reports
// whether fn did anything. It is READ COMMITTED. Under a REPEATABLE READ default, a test
// for emptiness after a lock would still use the snapshot before it, and a committed row
// would be destroyed.
func (s *postgres) guarded(ctx context.Context, limits shorttx.Limits, guard Guard, fn func(tx *sql.Tx) (did bool, err error)) (did bool, err error) {
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		held, err := guard(ctx, tx)
		if err != nil || !held {
			return err
		}
		did, err = fn(tx)
		return err
	})
	if err != nil {
		return false, err
	}
	return did, nil
}

func (s *postgres) Channel() string { return s.channel }

func (s *postgres) Notify(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, s.q.Notify, s.channel)
	return err
}

func (s *postgres) Sequence(ctx context.Context) (q Sequence, err error) {
	err = s.db.QueryRowContext(ctx, s.q.CheckSequence).Scan(&q.Last, &q.Cache, &q.Highest, &q.ScheduledBehind, &q.Standby, &q.ReadOnly)
	return q, err
}

func (s *postgres) Forged(ctx context.Context) ([]Ref, error) {
	return scanForged(s.db.QueryContext(ctx, s.q.Forged))
}

func (s *postgres) LastID(ctx context.Context) (last int64, err error) {
	err = s.db.QueryRowContext(ctx, s.q.LastID).Scan(&last)
	return last, err
}

func (s *postgres) RepairSequence(ctx context.Context, floor int64) (last int64, err error) {
	err = shorttx.Run(ctx, s.db, shorttx.Repair, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.q.LockWriters); err != nil {
			return fmt.Errorf("lock writers out: %w", err)
		}
		if err := tx.QueryRowContext(ctx, s.q.RepairSequence, floor).Scan(&last); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.q.RepairScheduled); err != nil {
			return fmt.Errorf("of scheduled messages: %w", err)
		}
		return nil
	})
	return last, err
}
