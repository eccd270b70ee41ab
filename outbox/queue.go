package outbox

import (
	"context"
	"database/sql"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
)

// Queue is the read side of an outbox, for a relay. It keeps no state about rows: a row
// in the table is an unconfirmed message, and a lane is always read from its start.
type Queue struct {
	box       *Outbox
	archiving *bounded.Calls // of Archive
}

// Queue returns the read side of o.
func (o *Outbox) Queue() *Queue { return &Queue{box: o, archiving: bounded.New(archiveAbandoned)} }

// ReadRequest selects what to read. Every lane is read from its start, in the order of
// ids.
type ReadRequest struct {
	Lanes []int
	Rows  int // largest number of rows of each lane
	Bytes int // largest number of bytes of payload and metadata of each lane; at least one row is returned

	// Known are the rows that the caller already holds; the read passes over them. They
	// are rows whose deletion has not committed before this read. Of rows with one id,
	// PostgreSQL passes over the newest only.
	Known []Known

	// Busy are keys to pass over, because enough of their rows already wait at the
	// caller.
	Busy []string

	// Hollow are topics whose rows are returned without payload and metadata, with
	// Row.Hollow set: the caller cannot send them now, and only needs to know that they
	// exist. They count as rows, but as no bytes.
	Hollow []string
}

// Known identifies a row that a reader holds. The id alone is not enough: a server that
// lost its latest commits gives ids out again, and the row that has one now is another.
type Known struct {
	ID        int64
	CreatedAt time.Time
}

// Read returns the rows that req selects, those of one lane together and in order. It
// sees every row that was committed when it started. The last row of a lane may come
// without its payload, if that has more bytes than the lane is to return: Row.Missing
// reports that.
func (q *Queue) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	return q.box.store.read(ctx, req)
}

// ReadPiece returns up to most bytes of the payload of a row, starting at offset. It
// returns none if the row no longer exists.
func (q *Queue) ReadPiece(ctx context.Context, of Ref, offset, most int) ([]byte, error) {
	return q.box.store.readPiece(ctx, of, offset, most)
}

// Ahead selects the rows that ReadAhead returns from each lane.
type Ahead struct {
	Topics []string // the oldest rows of these
	Newest int      // and this many of the newest rows of other topics
	Not    []string // but none of these topics

	Look int // how many of the newest rows of each lane to consider

	// Scan bounds the search for earlier rows of the same keys, in rows of the table.
	// If the table has as many or more, no row with a key is returned.
	Scan int

	Unordered bool // keys do not order rows
}

// ReadAhead returns rows that may go before those in front of them in their lanes: rows
// without a key, and rows whose key has no earlier row outside req.Known. Rows of one
// lane are returned together and in order, at most req.Rows of the requested topics,
// which get their bytes first. Its cost grows with the number of rows in the table, up
// to ahead.Scan.
func (q *Queue) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	return q.box.store.readAhead(ctx, req, ahead)
}

// Removal is the result of Remove.
type Removal struct {
	// Missed is the number of rows that were removed but not kept in the history,
	// because it could not be written.
	Missed int

	// Locked are rows that still exist because another transaction has locked them.
	// Remove them again later.
	Locked []Ref
}

// Remove deletes rows that the broker has confirmed, and moves them into the history if
// one is kept. It never waits long for a lock: a row that another transaction has
// locked is skipped and returned. After an error, any of the rows may have been
// removed.
//
// A row is matched by lane, id, message id and creation time. A row that is gone, or
// another row that got the same id after the server lost its latest commits, is left
// alone. Removing twice is harmless, whichever worker holds the lane: the message has
// been confirmed.
func (q *Queue) Remove(ctx context.Context, rows []Ref) (Removal, error) {
	return q.box.store.remove(ctx, rows)
}

// Check returns [ErrSequenceBehind] or [ErrSequenceCached] if the outbox would give out
// ids that break the order of keys. It returns [ErrReadOnly] if a PostgreSQL server
// accepts no writes, and a *oncemill.SchemaError if the tables are not migrated. A
// relay publishes nothing until it passes.
func (q *Queue) Check(ctx context.Context) error {
	if err := oncemill.CheckMigrated(ctx, q.box.db, q.box.cfg.Database, Migrations); err != nil {
		return err
	}
	return q.box.store.check(ctx)
}

// LastID returns the last id that was given out. Ids in use outside the outbox and its
// history must not exceed it.
func (q *Queue) LastID(ctx context.Context) (int64, error) {
	return q.box.store.lastID(ctx)
}

// RepairSequence sets the id sequence above every id in use in the outbox and its
// history, and above floor, with writers locked out. It returns the last id given out.
// floor is the highest id in use elsewhere. If you have a relay, call
// relay.RepairSequence, which determines it.
func (q *Queue) RepairSequence(ctx context.Context, floor int64) (int64, error) {
	return q.box.store.repairSequence(ctx, floor)
}

// Maintained is the result of Maintain.
type Maintained struct {
	Truncated int   // partitions of the ring emptied of dead rows
	Blocked   int   // partitions of the ring not truncated because of a lock; see Held
	Turned    int   // 1: ids moved to the next partition early, since reads passed over too many dead rows
	Made      int   // partitions of the history created
	Retired   int64 // partitions (PostgreSQL) or rows (SQLite) of the history removed

	// Again is set if another call is worthwhile sooner than usual: a partition is to
	// be truncated that others lock only briefly. It is the time to wait before that
	// call; 0: none is due.
	Again time.Duration
}

// Maintain does a part of the upkeep: dead rows of the ring, partitions and retention
// of the history. It calls guard in each transaction before it does anything, to lock
// the caller's lease. If guard returns false, nothing is done. One process at a time
// needs to call it, every few seconds; concurrent calls are safe.
func (q *Queue) Maintain(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (Maintained, error) {
	return q.box.store.maintain(ctx, guard)
}

// Listen returns a channel that receives after commits of this process (see Wake), and
// a function that stops it.
func (q *Queue) Listen() (wake <-chan struct{}, stop func()) {
	return q.box.wake.listen()
}

type guard = func(ctx context.Context, tx *sql.Tx) (bool, error)

// store is what differs between the databases.
type store interface {
	schedule(ctx context.Context, tx oncemill.Tx, rows []scheduledRow) error
	cancel(ctx context.Context, tx oncemill.Tx, messageID string) (int64, error)
	nextDue(ctx context.Context) (due, error)
	moveDue(ctx context.Context, guard guard, head due) (Moved, error)
	read(ctx context.Context, req ReadRequest) ([]Row, error)
	readPiece(ctx context.Context, of Ref, offset, most int) ([]byte, error)
	readAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error)
	remove(ctx context.Context, rows []Ref) (Removal, error)
	listHistory(ctx context.Context, f HistoryFilter) ([]HistoryRow, error)
	countHistory(ctx context.Context, f HistoryFilter) (int, error)
	resend(ctx context.Context, tx oncemill.Tx, f HistoryFilter) (int64, error)
	// expired returns the oldest history rows past their retention, behind a previous
	// batch; none without the lease. forget removes them, with the lease.
	expired(ctx context.Context, guard guard, behind expired) (expired, error)
	forget(ctx context.Context, guard guard, batch expired) (bool, error)
	held(ctx context.Context) (Held, error)
	check(ctx context.Context) error
	lastID(ctx context.Context) (int64, error)
	repairSequence(ctx context.Context, floor int64) (int64, error)
	maintain(ctx context.Context, guard guard) (Maintained, error)
}

func newStore(db *sql.DB, names database.Database, cfg Config) store {
	var history time.Duration
	if cfg.History != NoHistory {
		history = cfg.History
	}
	if cfg.Database.Dialect == oncemill.SQLite {
		return newSQLiteStore(db, names, history, cfg.Archive != nil, cfg.Logger)
	}
	s := newPostgresStore(db, names, history, cfg.Archive != nil, cfg.Logger)
	s.truncation = cfg.Truncate
	return s
}
