package relay

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
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

	taken chan struct{} // closed when the lease is taken; nil: nobody waits for that
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
	if epoch != 0 && t.taken != nil {
		close(t.taken)
		t.taken = nil
	}
}

// await waits until this worker holds the lease, and returns its epoch. It is not ok if
// ctx has ended.
func (t *upkeepLease) await(ctx context.Context) (epoch int64, ok bool) {
	for {
		t.mu.Lock()
		if t.epoch == 0 && t.taken == nil {
			t.taken = make(chan struct{})
		}
		epoch, taken := t.epoch, t.taken
		t.mu.Unlock()
		if epoch != 0 {
			return epoch, ctx.Err() == nil
		}
		select {
		case <-ctx.Done():
			return 0, false
		case <-taken:
		}
	}
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
	upkeepRest  = 5 * time.Second  // between rounds while nobody writes and nothing is found to do
	upkeepMore  = 5 * time.Second  // that a round may take, besides one call without an answer
	checkEvery  = 30 * time.Second // a switchover may pass without an error
	purgeEvery  = time.Minute

	archiveEvery = 10 * time.Second
	heldEvery    = 5 * time.Second
	heldLong     = 30 * time.Second

	forever = 100 * 365 * 24 * time.Hour
)

// upkeep maintains the outbox's tables while this worker has the lease for it. Each of
// its transactions locks that lease, so two workers never do it at once.
func (w *worker) upkeep(ctx context.Context) error {
	u := upkeep{worker: w, look: holders{met: w.met}, checkAt: time.Now().Add(checkEvery)}
	defer u.look.forget()
	rest := upkeepEvery
	for u.wait(ctx, rest) {
		epoch := w.upkeepLease.held()
		u.check(ctx, epoch)
		if epoch == 0 {
			u.look.forget()
			rest = checkEvery
			continue
		}
		u.lookForHolders(ctx)
		busy, err := u.round(ctx, epoch)
		switch {
		case err == nil && w.upkeepLease.held() != epoch: // it may have done nothing
		case err == nil:
			if attrs, report := w.failing.upkeep.Over(); report {
				w.log.InfoContext(ctx, "upkeep of the outbox works again", attrs...)
			}
		case errors.Is(err, context.DeadlineExceeded): // upkeepCalled has told it, or the round goes on in the next one
		case ctx.Err() == nil && !sqlerr.Retryable(err):
			level, attrs := w.failed(&w.failing.upkeep, slog.LevelWarn, err)
			w.log.Log(ctx, level, "upkeep of the outbox failed; trying again", append(attrs, "error", err)...)
		}
		rest = min(2*rest, upkeepRest)
		if busy || err != nil {
			rest = upkeepEvery
		}
	}
	return nil
}

// upkeep is when to do what of the upkeep. It belongs to the goroutine of that name.
type upkeep struct {
	*worker
	look    holders
	lookAt  time.Time
	checkAt time.Time
	checked int64 // with the lease of which epoch
	purgeAt time.Time
	lastID  int64 // that the outbox had given out at the last round
}

// wait waits for the next round. A worker without the lease may wait long, and is woken
// when it takes the lease.
func (u *upkeep) wait(ctx context.Context, rest time.Duration) bool {
	if !sleep.For(ctx, upkeepEvery) {
		return false
	}
	if u.upkeepLease.held() != 0 {
		return sleep.For(ctx, rest-upkeepEvery)
	}
	limited, cancel := context.WithTimeout(ctx, rest-upkeepEvery)
	defer cancel()
	_, _ = u.upkeepLease.await(limited) // a check may be due without the lease
	return ctx.Err() == nil
}

// check checks the tables from time to time, and once with each lease.
func (u *upkeep) check(ctx context.Context, epoch int64) {
	if epoch <= u.checked && time.Now().Before(u.checkAt) {
		return
	}
	u.checked, u.checkAt = max(u.checked, epoch), time.Now().Add(checkEvery)
	switch err := do(ctx, u.worker, opCheck, u.worker.check); {
	case err == nil: // a worker without lanes has no other way to find out
		u.unfit.Store(false)
	case ctx.Err() == nil && !transient(err):
		u.checkDue.Store(true)
	}
}

// round maintains the tables, and repeats that as long as it is worthwhile before the
// next round. busy reports that rows were written since the last round, or that there was
// something to do.
func (u *upkeep) round(ctx context.Context, epoch int64) (busy bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, u.health.full+upkeepMore)
	defer cancel()
	next := time.Now().Add(upkeepEvery)
	maintain := func() (outboxstore.Maintained, error) {
		done, err := ask(ctx, u.worker, opUpkeep, func(ctx context.Context) (outboxstore.Maintained, error) {
			return u.queue.Maintain(ctx, u.upkeepGuard(epoch))
		})
		u.upkeepCalled(ctx, opUpkeep, epoch, err)
		u.met.truncated.Add(ctx, int64(done.Truncated))
		busy = busy || done != (outboxstore.Maintained{})
		return done, err
	}
	done, err := maintain()
	for err == nil && done.Again > 0 && time.Now().Add(done.Again).Before(next) && sleep.For(ctx, done.Again) {
		done, err = maintain()
	}
	if last := u.queue.LastIDSeen(); last != u.lastID {
		u.lastID, busy = last, true
	}
	if !bounded.Silence(err) && !time.Now().Before(u.purgeAt) {
		// Needs no lease: a dead letter is purged once, whoever does it.
		_, purgeErr := ask(ctx, u.worker, opUpkeep, u.deadLetters.Purge)
		if purgeErr == nil {
			u.purgeAt = time.Now().Add(purgeEvery)
		}
		if err == nil || !bounded.Silence(purgeErr) {
			err = errors.Join(err, purgeErr)
		}
	}
	return busy, err
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
func (u *upkeep) lookForHolders(ctx context.Context) {
	if time.Now().Before(u.lookAt) {
		return
	}
	u.lookAt = time.Now().Add(heldEvery)
	known := &u.look
	held, err := ask(ctx, u.worker, opUpkeep, u.queue.Held)
	if err != nil {
		return // the upkeep itself reports what is wrong
	}
	known.reported = true
	u.met.held.Store(&held)
	if len(held.Blocked) == 0 {
		known.logged = 0
		return
	}
	if first := held.Blocked[0]; first.PID != known.logged && first.Age > heldLong {
		known.logged = first.PID
		u.log.WarnContext(ctx, "dead rows of the outbox cannot be removed while a transaction is open; reads pass over them",
			"pid", first.PID, "application", first.Application, "state", first.State, "age", first.Age)
	}
}

// archiver archives history rows past their retention, while this worker has the lease
// of the upkeep. It is separate from the upkeep since the user's function may take its
// time.
func (w *worker) archiver(ctx context.Context) error {
	if !w.queue.Archives() {
		return nil
	}
	for {
		epoch, ok := w.upkeepLease.await(ctx)
		if !ok {
			return nil
		}
		// The user's function may take its time, so this has no limit. It is left
		// behind if it does not return when ctx ends. What it says is not the database's.
		n, err := bounded.Do(ctx, bounded.New(1), forever, func(ctx context.Context) (int, error) {
			return w.queue.Archive(ctx, w.upkeepGuard(epoch))
		})
		if n > 0 {
			w.met.archived.Add(ctx, int64(n))
		}
		if errors.Is(err, outboxqueue.ErrNoAnswer) {
			w.upkeepCalled(ctx, opArchive, epoch, err)
		}
		if err != nil && ctx.Err() == nil && !sqlerr.Retryable(err) {
			level, attrs := w.failed(&w.failing.archive, slog.LevelError, err)
			w.log.Log(ctx, level, "archiving the history failed; it is kept, trying again", append(attrs, "error", err)...)
		} else if err == nil {
			if attrs, report := w.failing.archive.Over(); report {
				w.log.InfoContext(ctx, "the history is archived again", attrs...)
			}
		}
		sleep.For(ctx, archiveEvery)
	}
}

// upkeepGuard locks the lease of the upkeep in a transaction.
func (w *worker) upkeepGuard(epoch int64) func(context.Context, *sql.Tx) (bool, error) {
	return func(ctx context.Context, tx *sql.Tx) (bool, error) {
		return w.leases.Guard(ctx, tx, relaystore.UpkeepLane, w.owner, epoch)
	}
}
