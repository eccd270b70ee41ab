package outboxstore

import (
	"context"
	"database/sql"
	"embed"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/statements"
)

//go:embed migrations
var migrationFiles embed.FS

// Migrations holds the migrations of the tables outbox, outbox_history and scheduled.
var Migrations = statements.Migrations(migrationFiles)

//go:embed postgresql/*.sql sqlite/*.sql
var statementFiles embed.FS

// Guard locks the caller's lease in a transaction and reports whether the caller has
// it. Store calls it before anything else in a transaction, which does nothing if it
// returns false.
type Guard = func(ctx context.Context, tx *sql.Tx) (bool, error)

// Store is the database access of an outbox. It keeps no state about rows. Methods that
// take a transaction run in it; the others run short transactions.
//
// A row is known by its identity: lane, id, message id and creation time. A row that is
// gone, or another row that got the same id after the server lost its latest commits, is
// left alone.
type Store interface {
	// Insert writes rows in their order, which their ids follow.
	Insert(ctx context.Context, tx oncemill.ExecTx, rows []Row) error

	// PrepareInsert prepares the statement that writes one row. Its arguments are those
	// of InsertArgs.
	PrepareInsert(ctx context.Context) (*sql.Stmt, error)

	// Schedule writes messages for later. Those with the same due time keep their order.
	Schedule(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow) error

	// Cancel deletes the scheduled messages with an id, and returns how many. A message
	// that another transaction moves at the moment is waited for.
	Cancel(ctx context.Context, tx oncemill.ExecTx, messageID string) (int64, error)

	// Channel returns the channel on which Notify wakes other processes: "" if the
	// database has none.
	Channel() string

	// Notify announces a commit on the channel, with a statement that commits alone.
	Notify(ctx context.Context) error

	// Read returns the rows that a request selects, those of one lane together and in
	// order, from every transaction that had committed when it started.
	Read(ctx context.Context, req ReadRequest) ([]Row, error)

	// ReadPiece returns up to most bytes of the payload of a row, starting at offset,
	// and none if the row is gone or was changed.
	ReadPiece(ctx context.Context, of Ref, offset, most int) ([]byte, error)

	// ReadAhead returns rows that may go before those in front of them in their lanes:
	// rows without a key, and rows whose key has no earlier row outside req.Known.
	ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error)

	// ByCTID separates rows that RemoveAt can remove, in groups, from the rest.
	ByCTID(rows []Ref) (groups [][]Ref, rest []Ref)

	// RemoveAt removes a group where it was read, which is cheaper than Remove, and
	// reports whether it did. It removes all rows or none: none if one of them is gone,
	// was changed, or is locked for too long.
	RemoveAt(ctx context.Context, group []Ref, move bool) (bool, error)

	// Remove deletes rows or, with how.Move, moves them into the history. It returns how
	// many, and which are locked by others, with how.SkipLocked; without, it waits for
	// them, but not long.
	Remove(ctx context.Context, rows []Ref, how Removing) (removed int, locked []Ref, err error)

	// NextDue returns the first scheduled message that is not passed over. It reports
	// false if there is none.
	NextDue(ctx context.Context, over Passed) (Due, bool, error)

	// NextLarge returns the size of the first due message with more bytes than a
	// number, 0 if there is none or size does not matter.
	NextLarge(ctx context.Context, over Passed, bytes int64) (int64, error)

	// MoveDue moves due messages into the outbox, by due time, then publish order. A
	// message that an open transaction cancels is passed over, and so are the later ones
	// of its key. If a message may be the cause of an error, the error is a [*RowError].
	// After an error nothing was moved.
	//
	// On SQLite, where nothing else writes meanwhile, the first due messages are moved;
	// of the choice only its rows and bytes count.
	MoveDue(ctx context.Context, guard Guard, limits shorttx.Limits, choice Choice) (Batch, error)

	// Backlog describes what waits. It counts at most so many rows of each lane, and of the
	// scheduled messages.
	Backlog(ctx context.Context, most int) (Backlog, error)

	// Now returns the database's time, which the times of the history come from.
	Now(ctx context.Context) (time.Time, error)

	// ListWaiting returns rows of the outbox, in the order of their ids.
	ListWaiting(ctx context.Context, f WaitingFilter) ([]WaitingRow, error)

	// ListHistory returns rows of the history, in the order of their ids.
	ListHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error)

	// CountHistory returns how many messages Resend would write without a limit.
	CountHistory(ctx context.Context, f HistoryFilter) (int, error)

	// Resend writes messages of the history into the outbox again, once each, in the
	// order of their ids, and returns how many.
	Resend(ctx context.Context, tx oncemill.ExecTx, f HistoryFilter) (int64, error)

	// HistoryDays returns the days of the history, and those without a partition from
	// today on until so many days ahead. SQLite has none.
	HistoryDays(ctx context.Context, ahead int) (missing []string, days []Day, err error)

	// AddHistoryDay creates the partition of a day, unless it exists.
	AddHistoryDay(ctx context.Context, guard Guard, day string) (bool, error)

	// RetireHistoryDay empties or drops the partition of a day; with how.Empty only if
	// it has no rows.
	RetireHistoryDay(ctx context.Context, guard Guard, day string, how Retiring) (bool, error)

	// PurgeHistory deletes rows older than the retention, and returns how many.
	// PostgreSQL, which retires whole days, deletes none.
	PurgeHistory(ctx context.Context, guard Guard, retention time.Duration) (int64, error)

	// Expired returns the oldest history rows past their retention, behind a previous
	// batch; none without the lease.
	Expired(ctx context.Context, guard Guard, behind Expired, limits ExpiredLimits) (Expired, error)

	// DeleteExpired removes a batch of Expired, those rows alone. It reports false without the
	// lease.
	DeleteExpired(ctx context.Context, guard Guard, batch Expired) (bool, error)

	// Ring describes the partitions of the outbox. SQLite has none.
	Ring(ctx context.Context) (Ring, error)

	// HasStandby reports whether a standby replays this server's log.
	HasStandby(ctx context.Context) (bool, error)

	// TruncatePartition removes the dead rows of a partition of the ring, and reports
	// whether it did. It does nothing if the partition has other rows.
	TruncatePartition(ctx context.Context, guard Guard, limits shorttx.Limits, partition int) (bool, error)

	// PartitionLockers returns the transactions that hold a lock on a partition of the
	// ring.
	PartitionLockers(ctx context.Context, partition int) ([]string, error)

	// AdvanceIDs takes the remaining ids of the partition being written.
	AdvanceIDs(ctx context.Context, guard Guard) (bool, error)

	// OldestSnapshot returns what holds the oldest snapshot of the server, nil if
	// nothing does.
	OldestSnapshot(ctx context.Context) (*Holder, error)

	// RingLockers returns what holds a lock on the ring, longest first.
	RingLockers(ctx context.Context) ([]Holder, error)

	// Sequence describes the id sequence.
	Sequence(ctx context.Context) (Sequence, error)

	// Forged returns some rows with ids that the sequence cannot have given out.
	Forged(ctx context.Context) ([]Ref, error)

	// LastID returns the last id that was given out.
	LastID(ctx context.Context) (int64, error)

	// RepairSequence sets the id sequence above every id in use that is not forged, and
	// above floor, with writers locked out. It returns the last id given out.
	RepairSequence(ctx context.Context, floor int64) (int64, error)
}

// Open returns the store of a database. It does no I/O.
func Open(db *sql.DB, where database.Database) Store {
	if where.Dialect == oncemill.SQLite {
		return newSQLite(db, where.Names)
	}
	return newPostgres(db, where.Names)
}
