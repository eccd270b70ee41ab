// Package outboxqueue is the read side of an outbox, for a relay. It decides what is done
// when; package outboxstore does it.
package outboxqueue

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// Queue reads an outbox. It keeps no state about rows: a row in the table is an
// unconfirmed message, and a lane is always read from its start.
type Queue struct {
	box       *outbox.Outbox
	store     outboxstore.Store
	log       *slog.Logger
	retention time.Duration // of the history; 0: none is kept

	historyPause pause // while nothing is moved into the history
	scheduler    scheduler
	locks        lockBackoff
	deadScans    deadScans
	archiving    *bounded.Calls // of Archive
	lastID       atomic.Int64   // see LastIDSeen
}

// Of returns the read side of box.
func Of(box *outbox.Outbox) *Queue {
	cfg := box.Config()
	q := &Queue{
		box: box, store: outboxstore.Open(box.DB(), database.Of(cfg.Database)),
		log: cfg.Logger, retention: cfg.History, archiving: bounded.New(archiveAbandoned),
	}
	if cfg.History == outbox.NoHistory {
		q.retention = 0
	}
	q.scheduler = newScheduler(q.store, q.log)
	return q
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

// LastID returns the last id that was given out. Ids in use outside the outbox and its
// history must not exceed it.
func (q *Queue) LastID(ctx context.Context) (int64, error) {
	last, err := q.store.LastID(ctx)
	if err != nil {
		return 0, fmt.Errorf("read id sequence: %w", err)
	}
	return last, nil
}

// RepairSequence sets the id sequence above every id in use in the outbox and its
// history, and above floor, with writers locked out. It returns the last id given out.
// floor is the highest id in use elsewhere. If you have a relay, call
// relay.RepairSequence, which determines it.
func (q *Queue) RepairSequence(ctx context.Context, floor int64) (int64, error) {
	last, err := q.store.RepairSequence(ctx, floor)
	if err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	return last, nil
}

// Listen returns a channel that receives after commits of this process (see Wake), and
// a function that stops it.
func (q *Queue) Listen() (wake <-chan struct{}, stop func()) {
	return q.box.Listen()
}

// inconclusive reports whether an error is not caused by the statement itself.
func inconclusive(ctx context.Context, err error) bool {
	return ctx.Err() != nil || sqlerr.Connection(err) || sqlerr.Retryable(err) || sqlerr.Full(err)
}

// notNow reports whether an error only means that somebody else holds a lock (an open
// writer, a dump), or that reading a table took too long. The server says the same of a statement
// that was canceled since ctx ended.
func notNow(ctx context.Context, err error) bool {
	return ctx.Err() == nil && (sqlerr.TimedOut(err) || sqlerr.Retryable(err))
}
