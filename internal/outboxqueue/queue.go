// Package outboxqueue is the read side of an outbox, for a relay.
package outboxqueue

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// Queue reads an outbox. It keeps no state about rows: a row in the table is an
// unconfirmed message, and a lane is always read from its start.
type Queue struct {
	box       *outbox.Outbox
	store     outboxstore.Store
	archiving *bounded.Calls // of Archive
}

// Of returns the read side of box.
func Of(box *outbox.Outbox) *Queue {
	cfg := box.Config()
	history := cfg.History
	if history == outbox.NoHistory {
		history = 0
	}
	store := outboxstore.Open(box.DB(), database.Of(cfg.Database), outboxstore.Config{
		History: history, Archive: cfg.Archive != nil, Truncate: outboxstore.Truncation(cfg.Truncate), Logger: cfg.Logger,
	})
	return &Queue{box: box, store: store, archiving: bounded.New(archiveAbandoned)}
}

// Read returns the rows that req selects, those of one lane together and in order. It
// sees every row that was committed when it started. The last row of a lane may come
// without its payload, if that has more bytes than the lane is to return: Row.Missing
// reports that.
func (q *Queue) Read(ctx context.Context, req outboxstore.ReadRequest) ([]outboxstore.Row, error) {
	return q.store.Read(ctx, req)
}

// ReadPiece returns up to most bytes of the payload of a row, starting at offset. It
// returns none if the row no longer exists.
func (q *Queue) ReadPiece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
	return q.store.ReadPiece(ctx, of, offset, most)
}

// ReadAhead returns rows that may go before those in front of them in their lanes: rows
// without a key, and rows whose key has no earlier row outside req.Known. Rows of one
// lane are returned together and in order, at most req.Rows of the requested topics,
// which get their bytes first. Its cost grows with the number of rows in the table, up
// to ahead.Scan.
func (q *Queue) ReadAhead(ctx context.Context, req outboxstore.ReadRequest, ahead outboxstore.Ahead) ([]outboxstore.Row, error) {
	return q.store.ReadAhead(ctx, req, ahead)
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
func (q *Queue) Remove(ctx context.Context, rows []outboxstore.Ref) (outboxstore.Removal, error) {
	return q.store.Remove(ctx, rows)
}

// Check returns [ErrSequenceBehind] or [ErrSequenceCached] if the outbox would give out
// ids that break the order of keys. It returns [ErrReadOnly] if a PostgreSQL server
// accepts no writes, and a *oncemill.SchemaError if the tables are not migrated. A
// relay publishes nothing until it passes.
func (q *Queue) Check(ctx context.Context) error {
	if err := oncemill.CheckMigrated(ctx, q.box.DB(), q.box.Config().Database, outbox.Migrations); err != nil {
		return err
	}
	return q.store.Check(ctx)
}

// LastID returns the last id that was given out. Ids in use outside the outbox and its
// history must not exceed it.
func (q *Queue) LastID(ctx context.Context) (int64, error) {
	return q.store.LastID(ctx)
}

// RepairSequence sets the id sequence above every id in use in the outbox and its
// history, and above floor, with writers locked out. It returns the last id given out.
// floor is the highest id in use elsewhere. If you have a relay, call
// relay.RepairSequence, which determines it.
func (q *Queue) RepairSequence(ctx context.Context, floor int64) (int64, error) {
	return q.store.RepairSequence(ctx, floor)
}

// Maintain does a part of the upkeep: dead rows of the ring, partitions and retention
// of the history. It calls guard in each transaction before it does anything, to lock
// the caller's lease. If guard returns false, nothing is done. One process at a time
// needs to call it, every few seconds; concurrent calls are safe.
func (q *Queue) Maintain(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (outboxstore.Maintained, error) {
	return q.store.Maintain(ctx, guard)
}

// Listen returns a channel that receives after commits of this process (see Wake), and
// a function that stops it.
func (q *Queue) Listen() (wake <-chan struct{}, stop func()) {
	return q.box.Listen()
}

const (
	moveIdle = time.Second // something may be scheduled for an earlier time meanwhile
	moveHeld = 50 * time.Millisecond
)

// MoveDue moves a batch of due scheduled messages into the outbox, by due time, then
// publish order, and wakes the relays of this process. If nothing is due, it is one
// statement that reads the first message. guard is as in [Queue.Maintain]. Only one
// process at a time may call it, or the order of keys is lost.
//
// A message that an open transaction cancels, and the later ones of its key, are passed
// over until that transaction has ended.
func (q *Queue) MoveDue(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (outboxstore.Moved, error) {
	head, err := q.store.NextDue(ctx)
	if err != nil {
		return outboxstore.Moved{Next: moveIdle}, fmt.Errorf("look for what is due: %w", err)
	}
	if head.In > 0 {
		return outboxstore.Moved{Next: min(head.In, moveIdle)}, nil
	}
	moved, err := q.store.MoveDue(ctx, guard, head)
	switch {
	case err != nil:
		moved.Next = moveIdle
		return moved, fmt.Errorf("move what is due: %w", err)
	case moved.Rows > 0:
		q.box.Wake()
	default:
		moved.Next = moveHeld
	}
	return moved, nil
}

// Held finds what keeps dead rows in the tables. It runs several statements on system
// views: call it every few seconds at most. A role without pg_read_all_stats does not
// see the age of other roles' transactions. On SQLite it is empty.
func (q *Queue) Held(ctx context.Context) (outboxstore.Held, error) { return q.store.Held(ctx) }
