package relay

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// reader does the reads that the loop requests.
func (w *worker) reader(ctx context.Context) error {
	retry := newBackOff()
	large := pieces{read: func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		return ask(ctx, w, opRead, func(ctx context.Context) ([]byte, error) { return w.queue.ReadPiece(ctx, of, offset, most) })
	}}
	for {
		var r *read
		select {
		case <-ctx.Done():
			return nil
		case r = <-w.reads:
		}
		begin := time.Now()
		rows, err := ask(ctx, w, opRead, func(ctx context.Context) ([]outboxstore.Row, error) { return w.readLanes(ctx, r.ReadRequest, r.ahead) })
		r.took = time.Since(begin)
		answer := readAnswer{read: r, err: err}
		switch {
		case err == nil:
			retry.Reset()
			if attrs, report := w.failing.reads.Over(); report {
				w.log.InfoContext(ctx, "the outbox is read again", attrs...)
			}
			for i := range rows {
				r.brought += len(rows[i].Payload) + len(rows[i].Metadata)
			}
			r.short = large.complete(ctx, w, lackingRows(rows), r.space)
			answer.entries = newEntries(slices.DeleteFunc(rows, func(r outboxstore.Row) bool { return r.Missing > 0 }))
		case r.ahead != nil && sqlerr.TimedOut(err):
			w.log.DebugContext(ctx, "looking ahead took too long", "error", err)
		case ctx.Err() == nil:
			w.checkDue.Store(true)
			level, attrs := w.failed(&w.failing.reads, slog.LevelWarn, err)
			w.log.Log(ctx, level, "reading the outbox failed; trying again", append(attrs, "lanes", r.Lanes, "error", err)...)
			r.retryIn = retry.NextBackOff()
		}
		w.rows <- answer // has room: one read at a time
	}
}

func (w *worker) readLanes(ctx context.Context, req outboxstore.ReadRequest, ahead *outboxstore.Ahead) ([]outboxstore.Row, error) {
	if w.checkDue.Swap(false) {
		err := w.check(ctx)
		w.unfit.Store(err != nil && !transient(err) && ctx.Err() == nil)
		if err != nil {
			w.checkDue.Store(true)
			return nil, err
		}
	}
	var rows []outboxstore.Row
	var err error
	if ahead == nil {
		rows, err = w.queue.Read(ctx, req)
	} else {
		rows, err = w.queue.ReadAhead(ctx, req, *ahead)
	}
	if err != nil {
		return nil, err
	}
	if w.cfg.RequireDurable && len(rows) > 0 {
		if err := w.leases.Flush(ctx, w.owner); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

func newEntries(rows []outboxstore.Row) []*entry {
	batch := make([]entry, len(rows)) // one piece of memory for all
	entries := make([]*entry, len(rows))
	for i, r := range rows {
		e := &batch[i]
		e.fill(r)
		entries[i] = e
	}
	return entries
}

// remover does the deletions that the loop requests.
func (w *worker) remover(ctx context.Context) error {
	retry := newBackOff()
	for {
		var refs []outboxstore.Ref
		select {
		case <-ctx.Done():
			return nil
		case refs = <-w.removes:
		}
		removal, err := ask(ctx, w, opRemove, func(ctx context.Context) (outboxstore.Removal, error) { return w.queue.Remove(ctx, refs) })
		answer := removeAnswer{err: err, locked: removal.Locked}
		if removal.Missed > 0 {
			w.met.missed.Add(ctx, int64(removal.Missed))
		}
		switch {
		case err == nil:
			retry.Reset()
			if attrs, report := w.failing.removes.Over(); report {
				w.log.InfoContext(ctx, "confirmed messages are deleted again", attrs...)
			}
		case ctx.Err() == nil:
			answer.retryIn, answer.lost = retry.NextBackOff(), unanswered(err)
			w.doubt(err)
			level, attrs := w.failed(&w.failing.removes, slog.LevelWarn, err)
			w.log.Log(ctx, level, "deleting confirmed messages failed; trying again", append(attrs, "messages", len(refs), "error", err)...)
		}
		w.answers <- answer // has room: one deletion at a time
	}
}

// doubt makes the reader check the tables after an error, unless another transaction
// caused it. While a table that the check needs is locked, the check would stop the
// reading of tables that are not.
func (w *worker) doubt(err error) {
	if unanswered(err) || !transient(err) {
		w.checkDue.Store(true)
	}
}
