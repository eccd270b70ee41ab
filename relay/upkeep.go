package relay

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// upkeepLease is a worker's lease of the upkeep. A call under it without an answer ends
// it, so that another worker does what this one cannot. This one does not compete for
// it for a while, and takes it again if nobody else does.
type upkeepLease struct {
	mu       sync.Mutex // guards what follows
	epoch    int64      // of the lease; 0: this worker does not hold it
	silentAt time.Time  // when a call had no answer; zero: the last one had one
}

// held returns the epoch of the lease; 0: this worker does not hold it.
func (t *upkeepLease) held() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.epoch
}

// hold records the epoch of the lease; 0: this worker does not hold it.
func (t *upkeepLease) hold(epoch int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.epoch = epoch
}

// heard records how a call ended that was made under a lease with this epoch, and
// reports whether that has ended the lease.
func (t *upkeepLease) heard(epoch int64, now time.Time, err error) (ended bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.epoch != epoch: // a leftover of an earlier lease
		return false
	case bounded.Silence(err):
		t.epoch, t.silentAt = 0, now
		return true
	}
	t.silentAt = time.Time{}
	return false
}

// mayHold reports whether this worker may compete for the lease: its last call had an
// answer, or the silence was at least rest ago.
func (t *upkeepLease) mayHold(now time.Time, rest time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.silentAt.IsZero() || now.Sub(t.silentAt) >= rest
}

// upkeepCalled records how a call of the upkeep ended.
func (w *worker) upkeepCalled(ctx context.Context, o operation, epoch int64, err error) {
	if ctx.Err() != nil && bounded.Silence(err) {
		return // the round is over, or the run
	}
	if w.upkeepLease.heard(epoch, time.Now(), err) {
		w.log.WarnContext(ctx, "lease of the upkeep given up: no answer from the database", "operation", o, "error", err)
	}
}

const (
	upkeepEvery = time.Second
	upkeepMore  = 5 * time.Second // that a round may take, besides one call without an answer
	checkEvery  = 30              // rounds: a switchover may pass without an error

	archiveEvery = 10 // rounds
	heldEvery    = 5  // rounds
	heldLong     = 30 * time.Second

	forever = 100 * 365 * 24 * time.Hour
)

// upkeep maintains the outbox's tables while this worker has the lease for it. Each of
// its transactions locks that lease, so two workers never do it at once.
func (w *worker) upkeep(ctx context.Context) error {
	look := holders{met: w.met}
	defer look.forget()
	var checked int64 // with the lease of which epoch
	for n := 1; sleep.For(ctx, upkeepEvery); n++ {
		epoch := w.upkeepLease.held()
		if n%checkEvery == 0 || epoch > checked {
			checked = max(checked, epoch)
			switch err := do(ctx, w, opCheck, w.check); {
			case err == nil: // a worker without lanes has no other way to find out
				w.unfit.Store(false)
			case ctx.Err() == nil && !transient(err):
				w.checkDue.Store(true)
			}
		}
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

// maintain does a round, and repeats it as long as that is worthwhile before the next
// one.
func (w *worker) maintain(ctx context.Context, epoch int64) error {
	ctx, cancel := context.WithTimeout(ctx, w.health.full+upkeepMore)
	defer cancel()
	next := time.Now().Add(upkeepEvery)
	maintain := func() (outboxstore.Maintained, error) {
		done, err := ask(ctx, w, opUpkeep, func(ctx context.Context) (outboxstore.Maintained, error) {
			return w.queue.Maintain(ctx, w.upkeepGuard(epoch))
		})
		w.upkeepCalled(ctx, opUpkeep, epoch, err)
		w.met.truncated.Add(ctx, int64(done.Truncated))
		return done, err
	}
	done, err := maintain()
	for err == nil && done.Again > 0 && time.Now().Add(done.Again).Before(next) && sleep.For(ctx, done.Again) {
		done, err = maintain()
	}
	if !bounded.Silence(err) {
		// Needs no lease: a dead letter is purged once, whoever does it.
		_, forget := ask(ctx, w, opUpkeep, w.deadLetters.Purge)
		if err == nil || !bounded.Silence(forget) {
			err = errors.Join(err, forget)
		}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return nil // goes on in the next round
	}
	return err
}

// holders is what the upkeep's worker knows of the holders that keep dead rows in the
// tables.
type holders struct {
	met      *metrics
	reported bool // reported to the metrics
	logged   int  // the process
}

// forget leaves the metrics to the worker that now does the upkeep.
func (h *holders) forget() {
	if h.reported {
		h.met.held.Store(nil)
	}
	h.reported, h.logged = false, 0
}

// lookForHolders measures who keeps dead rows in the tables, and logs, once, who has
// blocked the ring for long.
func (w *worker) lookForHolders(ctx context.Context, known *holders) {
	held, err := ask(ctx, w, opUpkeep, w.queue.Held)
	if err != nil {
		return // the upkeep itself reports what is wrong
	}
	known.reported = true
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

// archiver archives history rows past their retention, while this worker has the lease
// of the upkeep. It is separate from the upkeep since the user's function may take its
// time.
func (w *worker) archiver(ctx context.Context) error {
	for n := 0; sleep.For(ctx, upkeepEvery); n++ {
		epoch := w.upkeepLease.held()
		if epoch == 0 {
			n = -1 // it begins with the lease
			continue
		}
		if n%archiveEvery != 0 {
			continue
		}
		// The user's function may take its time, so this has no limit. It is left
		// behind if it does not return when ctx ends.
		n, err := bounded.Do(ctx, w.bounds, forever, func(ctx context.Context) (int, error) {
			return w.queue.Archive(ctx, w.upkeepGuard(epoch))
		})
		if n > 0 {
			w.met.archived.Add(ctx, int64(n))
		}
		if errors.Is(err, outboxqueue.ErrNoAnswer) {
			w.upkeepCalled(ctx, opArchive, epoch, err)
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
		return w.leases.Guard(ctx, tx, relaystore.UpkeepLane, w.owner, epoch)
	}
}
