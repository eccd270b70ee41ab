package outbox

import (
	"context"
	"database/sql"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
)

// Queue is the read side of an outbox: what a relay needs. It remembers no
// row: one in the table is what is owed, and a lane is always read from its start.
type Queue struct {
	box       *Outbox
	archiving *bounded.Calls // of Archive
}

// Queue returns the read side of o.
func (o *Outbox) Queue() *Queue { return &Queue{box: o, archiving: bounded.New(archiveAbandoned)} }

// ReadRequest says what to read. Every lane is read from its start, in the order
// of ids.
type ReadRequest struct {
	Lanes []int
	Rows  int // at most so many of each lane
	Bytes int // of each lane at most so many bytes of payload and metadata, but at least one row

	// Known are the rows that the caller holds already; they are passed over. They
	// are rows whose deletion has not committed before this read. Of rows with one id,
	// PostgreSQL passes over the newest only.
	Known []Known

	// Busy are keys whose rows are to be passed over, because the caller has
	// enough of them waiting.
	Busy []string

	// Hollow are topics whose rows come without payload and metadata, with
	// Row.Hollow set: the caller cannot send them now, and only needs to know that
	// they are there. They count as rows, and as no bytes.
	Hollow []string
}

// Known identifies a row that a reader holds. The id alone is not enough: a server
// that lost its tail gives ids out again, and the row that has one now is another.
type Known struct {
	ID        int64
	CreatedAt time.Time
}

// Read returns the rows that req asks for, those of one lane together and in
// order. It sees every row that was committed when it started. The last row of a lane
// may come without its payload, if that has more bytes than the lane is to bring:
// Row.Missing says so.
func (q *Queue) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	return q.box.store.read(ctx, req)
}

// ReadPiece returns up to most bytes of the payload of a row, from an offset on; none if
// there is no such row any more.
func (q *Queue) ReadPiece(ctx context.Context, of Ref, offset, most int) ([]byte, error) {
	return q.box.store.readPiece(ctx, of, offset, most)
}

// Ahead says which rows a call of ReadAhead returns of each lane.
type Ahead struct {
	Topics []string // the oldest rows of these
	Newest int      // and so many of the newest rows of other topics
	Not    []string // but none of these topics

	Look int // of the newest rows of each lane, so many

	// Scan is among how many rows of the table earlier ones of their keys are looked
	// for. If there are as many or more, no row with a key is returned.
	Scan int

	Unordered bool // keys do not order rows
}

// ReadAhead returns rows that may go before those that are in front of them in their
// lanes: rows without a key, and rows before which their key has none that req.Known
// does not name. Rows of one lane come together and in order, at most req.Rows of the topics
// asked for, which are the first to get their bytes. The time that it takes grows with
// the number of rows in the table, up to ahead.Scan.
func (q *Queue) ReadAhead(ctx context.Context, req ReadRequest, ahead Ahead) ([]Row, error) {
	return q.box.store.readAhead(ctx, req, ahead)
}

// Removal says what a call of Remove did.
type Removal struct {
	// Missed is the number of rows that were removed without being kept in the
	// history, since that could not be written.
	Missed int

	// Locked are the rows that are still there because another transaction has
	// locked them. Remove them again later.
	Locked []Ref
}

// Remove deletes rows that the broker has confirmed, and moves them into the
// history if one is kept. It waits for nobody's lock for long: a row that another
// transaction has locked is skipped and returned. With an error, any of the rows may
// have been removed.
//
// A row is matched by lane, id, message id and creation time, so a row that is
// gone, or another one that was given the same id after the server lost its
// tail, is left alone. Removing twice is harmless, whoever owns the lane: the
// message has been confirmed.
func (q *Queue) Remove(ctx context.Context, rows []Ref) (Removal, error) {
	return q.box.store.remove(ctx, rows)
}

// Check returns [ErrSequenceBehind] or [ErrSequenceCached] if the outbox would
// give ids out that break the order of keys, [ErrReadOnly] if a PostgreSQL takes no
// writes, and a *oncemill.SchemaError if the tables are not migrated. A relay
// publishes nothing before it passes.
func (q *Queue) Check(ctx context.Context) error {
	if err := oncemill.CheckMigrated(ctx, q.box.db, q.box.cfg.Database, Migrations); err != nil {
		return err
	}
	return q.box.store.check(ctx)
}

// LastID returns the last id that was given out. Ids in use elsewhere than in the
// outbox and its history must not be above it.
func (q *Queue) LastID(ctx context.Context) (int64, error) {
	return q.box.store.lastID(ctx)
}

// RepairSequence sets the sequence of ids above every id in use in the outbox and
// its history, and above floor, with writers locked out, and returns the last id
// given out. The floor is the highest id that is in use elsewhere; where there is
// a relay, call relay.RepairSequence, which knows it.
func (q *Queue) RepairSequence(ctx context.Context, floor int64) (int64, error) {
	return q.box.store.repairSequence(ctx, floor)
}

// Maintained says what a call of Maintain did.
type Maintained struct {
	Truncated int   // partitions of the ring emptied of dead rows
	Blocked   int   // partitions of the ring that somebody's lock kept from that; see Held
	Turned    int   // 1: ids went on to the next partition early, since reads passed over too many dead rows
	Made      int   // partitions of the history made
	Retired   int64 // partitions (PostgreSQL) or rows (SQLite) of the history removed

	// Again is the time after which another call is worth it, sooner than usual: a
	// partition is to be truncated that others hold only for moments. 0: none is.
	Again time.Duration
}

// Maintain does a piece of the upkeep: dead rows of the ring, partitions and
// retention of the history. guard is called in each transaction before it does
// anything, to lock the caller's lease; if it returns false, nothing is done.
// One process at a time needs to call it, every few seconds; calling it at once
// from several is safe.
func (q *Queue) Maintain(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (Maintained, error) {
	return q.box.store.maintain(ctx, guard)
}

// Listen returns a channel that receives after commits of this process (see
// Wake), and a function that ends that.
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
	// expired returns the oldest rows of the history that are past their time, behind
	// a batch of them; none without the lease. forget removes them, with the lease.
	expired(ctx context.Context, guard guard, behind expired) (expired, error)
	forget(ctx context.Context, guard guard, batch expired) (bool, error)
	held(ctx context.Context) (Held, error)
	check(ctx context.Context) error
	lastID(ctx context.Context) (int64, error)
	repairSequence(ctx context.Context, floor int64) (int64, error)
	maintain(ctx context.Context, guard guard) (Maintained, error)
}

func newStore(db *sql.DB, cfg Config) store {
	var history time.Duration
	if cfg.History != NoHistory {
		history = cfg.History
	}
	if cfg.Database.Dialect == oncemill.SQLite {
		return newSQLiteStore(db, cfg.Database, history, cfg.Archive != nil, cfg.Logger)
	}
	s := newPostgresStore(db, cfg.Database, history, cfg.Archive != nil, cfg.Logger)
	s.truncation = cfg.Truncate
	return s
}
