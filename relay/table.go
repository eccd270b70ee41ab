package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// reader does the reads that the loop requests. An answer with an error comes after a
// pause, so that an unreachable database is not queried all the time.
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
			for i := range rows {
				r.brought += len(rows[i].Payload) + len(rows[i].Metadata)
			}
			r.short = large.complete(ctx, w, lackingRows(rows), r.space)
			answer.entries = newEntries(slices.DeleteFunc(rows, func(r outboxstore.Row) bool { return r.Missing > 0 }))
		case r.ahead != nil && sqlerr.TimedOut(err):
			w.log.DebugContext(ctx, "looking ahead took too long", "error", err)
		case ctx.Err() == nil:
			w.checkDue.Store(true)
			w.log.WarnContext(ctx, "reading the outbox failed; trying again", "lanes", r.Lanes, "error", err)
			pause(ctx, retry.NextBackOff())
		}
		w.rows <- answer // has room: one read at a time
	}
}

func (w *worker) readLanes(ctx context.Context, req outboxstore.ReadRequest, ahead *outboxstore.Ahead) ([]outboxstore.Row, error) {
	if w.checkDue.Swap(false) {
		err := w.check(ctx)
		w.unfit.Store(err != nil && !passing(err) && ctx.Err() == nil)
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
		if err := w.leases.flush(ctx, w.owner); err != nil {
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
		case ctx.Err() == nil:
			answer.retryIn, answer.lost = retry.NextBackOff(), unanswered(err)
			w.doubt(err)
			w.log.WarnContext(ctx, "deleting confirmed messages failed; trying again", "messages", len(refs), "error", err)
		}
		w.answers <- answer // has room: one deletion at a time
	}
}

// doubt makes the reader check the tables after an error, unless another transaction
// caused it. While a table that the check needs is locked, the check would stop the
// reading of tables that are not.
func (w *worker) doubt(err error) {
	if unanswered(err) || !passing(err) {
		w.checkDue.Store(true)
	}
}

// parker does the chores that the loop requests.
func (w *worker) parker(ctx context.Context) error {
	retry := newBackOff()
	large := pieces{read: func(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
		return ask(ctx, w, opTask, func(ctx context.Context) ([]byte, error) { return w.store.piece(ctx, of, offset, most) })
	}}
	type work struct {
		found   func()
		lacking []*outboxstore.Row
		space   *space
	}
	for {
		var c *chore
		select {
		case <-ctx.Done():
			return nil
		case c = <-w.chores:
		}
		var answer choreAnswer
		did, err := ask(ctx, w, opTask, func(ctx context.Context) (did work, err error) {
			did.found, err = c.do(choreContext{
				Context: ctx, store: w.store, clock: time.Now,
				bring: func(rows []*outboxstore.Row, s *space) { did.lacking, did.space = rows, s },
				missed: func(n int) {
					if n > 0 {
						w.met.missed.Add(ctx, int64(n))
					}
				},
			})
			return did, err
		})
		answer.found, answer.err = did.found, err
		if err == nil {
			large.complete(ctx, w, did.lacking, did.space)
		}
		switch {
		case answer.err == nil:
			retry.Reset()
			w.reportFailures(ctx, c.failures)
		case errors.Is(answer.err, errFenced):
			w.log.WarnContext(ctx, "lane was taken by another worker; nothing was written", "lane", c.lane.number)
		case ctx.Err() == nil:
			answer.retryIn, answer.kind = retry.NextBackOff(), choreErrorOf(answer.err)
			w.doubt(answer.err)
			w.log.WarnContext(ctx, "reading or writing parked messages or dead letters failed; trying again", "error", answer.err)
		}
		w.chored <- answer // has room: one chore at a time
	}
}

func choreErrorOf(err error) choreError {
	switch {
	case sqlerr.Retryable(err):
		return choreCollided
	case unanswered(err):
		return choreLost
	}
	return choreImpossible
}

// reportFailures logs and counts failures that have been recorded.
func (w *worker) reportFailures(ctx context.Context, failures []failure) {
	for _, f := range failures {
		if f.free {
			w.met.setAside.Add(ctx, 1)
			continue
		}
		attrs := []any{"lane", f.Lane, "id", f.ID, "message_id", f.MessageID, "attempt", f.attempt, "reason", f.class, "error", f.text}
		switch f.verdict {
		case retryLater:
			w.met.parked.Add(ctx, 1)
			w.log.WarnContext(ctx, "message failed and is tried again later", append(attrs, "retry_in", f.retryIn)...)
		case letterSkip:
			w.met.dead.Add(ctx, 1)
			w.log.ErrorContext(ctx, "message is a dead letter now", attrs...)
		case letterHold:
			w.met.dead.Add(ctx, 1)
			w.log.ErrorContext(ctx, "message is a dead letter now and holds its key", attrs...)
		}
	}
}
