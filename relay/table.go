package relay

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// reader does the reads that the loop asks for. An answer with an error comes
// after a pause, so that a database that is away is not asked all the time.
func (w *worker) reader(ctx context.Context) error {
	retry := newBackOff()
	for {
		var r *read
		select {
		case <-ctx.Done():
			return nil
		case r = <-w.reads:
		}
		entries, err := ask(ctx, w, opRead, func(ctx context.Context) ([]*entry, error) { return w.readLanes(ctx, r.ReadRequest, r.ahead) })
		switch {
		case err == nil:
			retry.Reset()
		case r.ahead != nil && sqlerr.TimedOut(err):
			w.log.DebugContext(ctx, "looking ahead took too long", "error", err)
		case ctx.Err() == nil:
			w.checkDue.Store(true)
			w.log.WarnContext(ctx, "reading the outbox failed; trying again", "error", err)
			pause(ctx, retry.NextBackOff())
		}
		w.rows <- readAnswer{read: r, entries: entries, err: err} // has room: one read at a time
	}
}

func (w *worker) readLanes(ctx context.Context, req outbox.ReadRequest, ahead *outbox.Ahead) ([]*entry, error) {
	if w.checkDue.Swap(false) {
		err := w.check(ctx)
		w.unfit.Store(err != nil && !passing(err) && ctx.Err() == nil)
		if err != nil {
			w.checkDue.Store(true)
			return nil, err
		}
	}
	var rows []outbox.Row
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
	batch := make([]entry, len(rows)) // one piece of memory for all
	entries := make([]*entry, len(rows))
	for i, r := range rows {
		e := &batch[i]
		e.fill(r)
		entries[i] = e
	}
	return entries, nil
}

// remover does the deletions that the loop asks for.
func (w *worker) remover(ctx context.Context) error {
	retry := newBackOff()
	for {
		var refs []outbox.Ref
		select {
		case <-ctx.Done():
			return nil
		case refs = <-w.removes:
		}
		removal, err := ask(ctx, w, opRemove, func(ctx context.Context) (outbox.Removal, error) { return w.queue.Remove(ctx, refs) })
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

// doubt makes the reader check the tables after an error, but for one that another
// transaction is the cause of: while somebody has locked a table that the check needs,
// it would stop the reading of those that it does not.
func (w *worker) doubt(err error) {
	if unanswered(err) || !passing(err) {
		w.checkDue.Store(true)
	}
}

// parker does the chores that the loop asks for.
func (w *worker) parker(ctx context.Context) error {
	retry := newBackOff()
	for {
		var c *chore
		select {
		case <-ctx.Done():
			return nil
		case c = <-w.chores:
		}
		var answer choreAnswer
		answer.found, answer.err = ask(ctx, w, opTask, func(ctx context.Context) (func(), error) {
			return c.do(choreContext{Context: ctx, store: w.store, clock: time.Now, missed: func(n int) {
				if n > 0 {
					w.met.missed.Add(ctx, int64(n))
				}
			}})
		})
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

// reportFailures tells of failures that have been written down.
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

const (
	upkeepEvery = time.Second
	upkeepLimit = 5 * time.Second // for one round
	checkEvery  = 30              // rounds: a switchover may pass without an error

	archiveEvery = 10 // rounds
	heldEvery    = 5  // rounds
	heldLong     = 30 * time.Second

	forever = 100 * 365 * 24 * time.Hour
)

// upkeep keeps the outbox's tables while this worker has the lease for it. Each
// of its transactions locks that lease, so two workers never do it at once.
func (w *worker) upkeep(ctx context.Context) error {
	look := holders{met: w.met}
	defer look.forget()
	for n := 1; pause(ctx, upkeepEvery); n++ {
		if n%checkEvery == 0 {
			switch err := do(ctx, w, opCheck, w.check); {
			case err == nil: // a worker without lanes has no other way to tell
				w.unfit.Store(false)
			case ctx.Err() == nil && !passing(err):
				w.checkDue.Store(true)
			}
		}
		epoch := w.upkeepEpoch.Load()
		if epoch == 0 {
			look.forget()
			continue
		}
		if n%heldEvery == 0 {
			w.lookForHolders(ctx, &look)
		}
		if err := w.maintain(ctx, epoch); err != nil && ctx.Err() == nil && !sqlerr.Retryable(err) {
			w.log.WarnContext(ctx, "upkeep of the outbox failed; trying again", "error", err)
		}
	}
	return nil
}

// maintain does a round, and again what is worth it before the next one.
func (w *worker) maintain(ctx context.Context, epoch int64) error {
	ctx, cancel := context.WithTimeout(ctx, upkeepLimit)
	defer cancel()
	next := time.Now().Add(upkeepEvery)
	maintain := func() (outbox.Maintained, error) {
		done, err := ask(ctx, w, opUpkeep, func(ctx context.Context) (outbox.Maintained, error) {
			return w.queue.Maintain(ctx, w.upkeepGuard(epoch))
		})
		w.met.truncated.Add(ctx, int64(done.Truncated))
		return done, err
	}
	done, err := maintain()
	for err == nil && done.Again > 0 && time.Now().Add(done.Again).Before(next) && pause(ctx, done.Again) {
		done, err = maintain()
	}
	if err == nil {
		// Needs no lease: letters are forgotten once, whoever does it.
		_, err = ask(ctx, w, opUpkeep, w.letters.Forget)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil // goes on in the next round
	}
	return err
}

// holders is what the worker that does the upkeep knows of those who keep dead
// rows in the tables.
type holders struct {
	met    *metrics
	told   bool // to the metrics
	logged int  // the process
}

// forget leaves the metrics to the worker that does the upkeep now.
func (h *holders) forget() {
	if h.told {
		h.met.held.Store(nil)
	}
	h.told, h.logged = false, 0
}

// lookForHolders measures who keeps dead rows in the tables, and logs who has held
// the ring for long, once.
func (w *worker) lookForHolders(ctx context.Context, known *holders) {
	ctx, cancel := context.WithTimeout(ctx, upkeepLimit)
	defer cancel()
	held, err := ask(ctx, w, opUpkeep, w.queue.Held)
	if err != nil {
		return // the upkeep itself will say what is wrong
	}
	known.told = true
	w.met.held.Store(&held)
	if len(held.Blocked) == 0 {
		known.logged = 0
		return
	}
	if first := held.Blocked[0]; first.PID != known.logged && first.Age > heldLong {
		known.logged = first.PID
		w.log.WarnContext(ctx, "dead rows of the outbox cannot be removed while a transaction is open; reads pass over them",
			"pid", first.PID, "application", first.Application, "state", first.State, "age", first.Age)
	}
}

// archiver hands over what is past the history's time, while this worker has the
// lease of the upkeep. It is apart from the upkeep since the user's function may
// take its time.
func (w *worker) archiver(ctx context.Context) error {
	for n := 0; pause(ctx, upkeepEvery); n++ {
		epoch := w.upkeepEpoch.Load()
		if epoch == 0 {
			n = -1 // it begins with the lease
			continue
		}
		if n%archiveEvery != 0 {
			continue
		}
		// The user's function may take its time, so this has no limit; when ctx ends
		// it is left behind if it does not return.
		n, err := bounded.Do(ctx, w.bounds, forever, func(ctx context.Context) (int, error) {
			return w.queue.Archive(ctx, w.upkeepGuard(epoch))
		})
		if n > 0 {
			w.met.archived.Add(ctx, int64(n))
		}
		if err != nil && ctx.Err() == nil && !sqlerr.Retryable(err) {
			w.log.ErrorContext(ctx, "archiving the history failed; it is kept, trying again", "error", err)
		}
	}
	return nil
}

// upkeepGuard locks the lease of the upkeep in a transaction.
func (w *worker) upkeepGuard(epoch int64) func(context.Context, *sql.Tx) (bool, error) {
	return func(ctx context.Context, tx *sql.Tx) (bool, error) {
		return w.leases.guard(ctx, tx, upkeepLane, w.owner, epoch)
	}
}
