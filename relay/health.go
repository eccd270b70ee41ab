package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// operation is a kind of database call that a worker depends on.
type operation uint8

const (
	opRead operation = iota
	opRemove
	opTask
	opHeartbeat
	opTake
	opMove
	opUpkeep
	opArchive
	opCheck
	opSteer
	opCommand
	operations // how many there are
)

func (o operation) String() string {
	return [...]string{
		"reading the outbox", "deleting confirmed messages", "moving messages that failed", "renewing leases",
		"taking leases", "moving scheduled messages", "upkeep of the tables", "archiving the history", "checking the tables",
		"reading pauses", "carrying out commands of operators",
	}[o]
}

// maxAbandoned is how many calls that do not return a worker leaves behind. Each holds
// a goroutine and a connection.
const maxAbandoned = 16

// health tracks whether a worker reaches its database. A kind of operation without an
// answer for longer than health.maxSilence makes the worker unfit. Its lanes go to others
// until a probe of every kind has been answered, and its own calls have had no silence
// for a while. An error of the server is an answer: what the server refuses here it
// refuses to others.
//
// Some calls of a kind may have answers while others have none: a deletion hangs, a
// read does not. So an answer does not end a silence until there has been no other for
// a while.
//
// A silence that heartbeats share is the whole database's: it does not count before the lease has
// ended, and is forgotten once heartbeats are answered. Otherwise all workers would be unfit for a
// while after each outage, and the first to recover would get the lanes of all others.
//
// Calls of the upkeep do not count, see upkeepLease. Nor do heartbeats: without them the
// leases end by themselves. Nor do reads of pauses: those read last apply. Nor do
// commands of operators.
type health struct {
	lease      time.Duration
	full       time.Duration // that a call may take
	maxSilence time.Duration // without an answer, until the worker is unfit

	silence chan struct{} // signaled by each call without an answer; see doctor
	back    chan struct{} // signaled when heartbeats are answered again; see loop

	mu    sync.Mutex // guards what follows
	kinds [operations]contact
}

// contact is the state of one kind of operation, which has one call at a time.
type contact struct {
	since    time.Time     // when the silence began: with its first call; zero: there is none
	last     time.Time     // when the last call without an answer ended; zero: none has
	lost     int           // calls without an answer
	answered bool          // others have had one
	busy     time.Time     // when the call began that runs; zero: none does
	limit    time.Duration // of the next call; 0: full
	forgiven time.Time     // when a silence was forgotten; zero: never, or a call was answered since
}

// callLeast is the minimum time of a call, however short the lease: calls wait a little
// for rows that others have locked.
const callLeast = 2 * time.Second

func newHealth(lease time.Duration) health {
	full := max(lease/3, callLeast)
	return health{lease: lease, full: full, maxSilence: max(lease/2, full), silence: make(chan struct{}, 1), back: make(chan struct{}, 1)}
}

// begin records the start of a call and returns its time limit. A call after one
// without an answer gets a short limit at first: it may get another dead connection,
// and has to find that out soon.
func (h *health) begin(o operation, now time.Time) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := &h.kinds[o]
	k.busy = now
	if k.since.IsZero() {
		k.since = now
	}
	if k.limit == 0 {
		return h.full
	}
	return k.limit
}

// end records the end of a call, and whether it was answered.
func (h *health) end(o operation, now time.Time, answered bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := &h.kinds[o]
	k.busy = time.Time{}
	if answered && o == opHeartbeat && k.lost > 0 {
		h.forgive(now)
		raise(h.back)
	}
	switch {
	case answered && now.Sub(k.last) > h.maxSilence:
		*k = contact{}
		return
	case answered && o == opHeartbeat: // the outage is over
		*k = contact{last: k.last, limit: k.limit}
		return
	case answered:
		k.answered, k.forgiven = true, time.Time{}
		return
	case k.limit == 0 || k.limit >= h.full:
		k.limit = h.short()
	default:
		k.limit = min(2*k.limit, h.full)
	}
	if k.since.IsZero() { // the rest was forgotten while it ran
		k.since = now
	}
	k.last = now
	k.lost++
	raise(h.silence)
}

// shared reports whether a silence began with that of the heartbeats, which goes on. When the lease has
// ended, others have the lanes, and it counts. What goes on since a silence was forgotten counts, too,
// or heartbeats that fail now and then would hide it.
func (h *health) shared(k *contact, now time.Time) bool {
	beats := &h.kinds[opHeartbeat]
	silent := beats.lost > 0 || beats.hangs(now, h.short())
	again := !k.forgiven.IsZero() && k.since.Sub(k.forgiven) < h.maxSilence
	return silent && now.Sub(beats.since) <= h.lease && !again && !k.since.Before(beats.since.Add(-h.full))
}

// forgive forgets the silences that the heartbeats share, as these are answered again.
func (h *health) forgive(now time.Time) {
	for o := range h.kinds {
		k := &h.kinds[o]
		if apart(operation(o)) || !h.shared(k, now) || k.lost == 0 && !k.hangs(now, h.short()) {
			continue
		}
		*k = contact{busy: k.busy, limit: k.limit, forgiven: now}
		if !k.busy.IsZero() {
			k.since = now
		}
	}
}

// doubtful reports whether calls that count for the worker's fitness had no answer, and
// that is not over yet. Otherwise the worker is fit, or a call that hangs is about to end.
func (h *health) doubtful() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for o := range h.kinds {
		if !apart(operation(o)) && h.kinds[o].lost > 0 {
			return true
		}
	}
	return false
}

// short is the limit of a call that may get a dead connection.
func (h *health) short() time.Duration { return h.full / 5 }

// hangs reports whether a running call should have been answered by now.
func (k *contact) hangs(now time.Time, short time.Duration) bool {
	return !k.busy.IsZero() && now.Sub(k.busy) > short
}

// silent returns how long there has been no answer. One call without an answer among
// others means little: its connection may be the only dead one.
func (k *contact) silent(now time.Time, short time.Duration) time.Duration {
	switch {
	case k.hangs(now, short), k.lost > 0 && !k.answered:
		return now.Sub(k.since)
	case k.lost > 1:
		return k.last.Sub(k.since)
	}
	return 0
}

// unfit returns how long the worker has been unfit, and why; nil: it is not.
func (h *health) unfit(now time.Time) (since time.Duration, why error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for o := range operations {
		k := &h.kinds[o]
		if apart(o) || h.shared(k, now) {
			continue
		}
		if silent := k.silent(now, h.short()); silent > h.maxSilence && silent-h.maxSilence >= since {
			why, since = fmt.Errorf("no answer from the database for %v to: %v", silent.Truncate(time.Second), o), silent-h.maxSilence
		}
	}
	return since, why
}

// recover forgets unanswered calls: probes of every kind have been answered. It does
// not while a call of the worker itself hangs, or shortly after one went unanswered: it
// may be of a kind that no probe covers.
func (h *health) recover(now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for o := range h.kinds {
		if k := &h.kinds[o]; !apart(operation(o)) && (k.hangs(now, cmp.Or(k.limit, h.full)) || now.Sub(k.last) < h.full) {
			return false
		}
	}
	for o := range h.kinds {
		k := &h.kinds[o]
		if operation(o) == opHeartbeat { // which no probe makes: its silence goes on
			continue
		}
		*k = contact{busy: k.busy}
		if !k.busy.IsZero() {
			k.since = now
		}
	}
	return true
}

// apart reports whether a kind of operation does not count for a worker's fitness.
func apart(o operation) bool {
	return o == opHeartbeat || o == opCheck || o == opMove || o == opUpkeep || o == opArchive || o == opSteer || o == opCommand
}

// ask makes a database call that ends in time, whether it returns or not; see
// [bounded.Do].
func ask[T any](ctx context.Context, w *worker, o operation, f func(ctx context.Context) (T, error)) (T, error) {
	if err := ctx.Err(); err != nil {
		var none T
		return none, err
	}
	if crashpoint.On {
		crashpoint.Reach(crashpoint.Before(o.String()))
		defer crashpoint.Reach(crashpoint.After(o.String()))
	}
	limit := w.health.begin(o, time.Now())
	value, err := bounded.Do(ctx, w.bounds, limit, f)
	w.health.end(o, time.Now(), errors.Is(ctx.Err(), context.Canceled) || !unanswered(err))
	return value, err
}

// askLong is ask for a call that may take longer than others. Its silence does not
// count until then.
func askLong[T any](ctx context.Context, w *worker, limit time.Duration, f func(ctx context.Context) (T, error)) (T, error) {
	return bounded.Do(ctx, w.bounds, limit, f)
}

// do is ask for calls without a result.
func do(ctx context.Context, w *worker, o operation, f func(ctx context.Context) error) error {
	_, err := ask(ctx, w, o, func(ctx context.Context) (struct{}, error) { return struct{}{}, f(ctx) })
	return err
}

const doctorEvery = time.Second

// doctor logs when the worker has become unfit, and makes it fit again; see health. The
// worker may have no lanes then, so nothing else would do it. While all calls have
// answers, it sleeps.
func (w *worker) doctor(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.health.silence:
			w.treat(ctx)
		}
	}
}

// treat checks the worker's fitness until it is beyond doubt.
func (w *worker) treat(ctx context.Context) {
	logged := false
	for (logged || w.health.doubtful()) && sleep.For(ctx, min(doctorEvery, w.cfg.Lease/5)) {
		_, why := w.health.unfit(time.Now())
		switch {
		case why == nil && logged: // its calls had answers for a while
			logged = false
			w.log.InfoContext(ctx, "worker is fit again, the database answers")
			continue
		case why == nil:
			continue
		case !logged:
			logged = true
			w.log.ErrorContext(ctx, "worker is unfit, its lanes go to other workers", "error", why, "abandoned_calls", w.bounds.Abandoned())
		}
		if err := w.probe(ctx); err != nil {
			continue
		}
		if !w.health.recover(time.Now()) {
			continue
		}
		logged = false
		w.log.InfoContext(ctx, "worker is fit again, the database answers")
	}
}

// noLane is a lane without messages. A probe thus returns none, however large the first
// message of a real lane is.
const noLane = outbox.Lanes

// probe makes a call of each kind that changes nothing: the rows do not exist, or the
// lease does not.
func (w *worker) probe(ctx context.Context) error {
	lanes, ref := []int{noLane}, outboxstore.Ref{CreatedAt: time.Unix(0, 0)}
	nobody := relaystore.Fence{Owner: w.owner} // a lease that was taken has an epoch above 0
	probes := []func(context.Context) error{
		w.check,
		func(ctx context.Context) error {
			_, err := w.queue.Read(ctx, outboxstore.ReadRequest{Lanes: lanes, Rows: 1, Bytes: 1})
			return err
		},
		func(ctx context.Context) error { _, err := w.queue.Remove(ctx, []outboxstore.Ref{ref}); return err },
		func(ctx context.Context) error {
			_, err := w.leases.Take(ctx, w.owner, nil, 0, w.cfg.Lease)
			return err
		},
		func(ctx context.Context) error { _, err := w.store.Keys(ctx, lanes); return err },
		func(ctx context.Context) error {
			_, err := w.queue.MoveOrDelete(ctx, func(ctx context.Context, move bool) (int, error) {
				removal, err := w.store.Remove(ctx, []outboxstore.Ref{ref}, move)
				return removal.Rows, err
			})
			return err
		},
		func(ctx context.Context) error { _, err := w.store.Commands(ctx, lanes, 1); return err },
		func(ctx context.Context) error {
			_, err := w.store.Due(ctx, relaystore.DueRequest{Lanes: lanes, Topics: 1, Heads: 1, Rows: 1})
			return err
		},
		func(ctx context.Context) error { return w.store.SetAlone(ctx, nobody, 0) },
		func(ctx context.Context) error { return w.store.ClearCrashes(ctx, w.owner, nil) },
		func(ctx context.Context) error { _, err := w.store.Follow(ctx, nobody, nil, nil, 1); return err },
	}
	for _, v := range []relaystore.Fate{relaystore.FateRetry, relaystore.FateDeadLetter, relaystore.FateHoldKey} {
		for _, retrying := range []bool{false, true} {
			probes = append(probes, func(ctx context.Context) error {
				return w.store.Fail(ctx, nobody, []relaystore.Failure{{Ref: ref, Retrying: retrying, Attempt: 1, Fate: v}}, nil)
			})
		}
	}
	for _, probe := range probes {
		if err := do(ctx, w, opCheck, probe); err != nil && !errors.Is(err, relaystore.ErrFenced) {
			return err
		}
	}
	return nil
}

// Ready returns nil if all running workers of this relay can do their work. Otherwise
// it returns what is wrong, joined: no worker runs, the database does not answer, the
// tables are not as they should be, the sink does not reach its broker. It does no I/O
// and may be called at any time. It is meant for readiness probes: a worker that is not
// ready gives its lanes to one that is.
func (r *Relay) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.running) == 0 {
		return ErrNotRunning
	}
	var errs []error
	for w := range r.running {
		errs = append(errs, w.notReady())
	}
	return errors.Join(errs...)
}

// notReady returns why this worker cannot do its work, nil if it can.
func (w *worker) notReady() error {
	if _, why := w.health.unfit(time.Now()); why != nil {
		return fmt.Errorf("relay: worker %s: %w", w.owner, why)
	}
	if w.unfit.Load() {
		return fmt.Errorf("relay: worker %s: %w", w.owner, errTables)
	}
	if at := w.renewedAt.Load(); at == 0 || time.Since(time.Unix(0, at)) > w.cfg.Lease {
		return fmt.Errorf("relay: worker %s: %w", w.owner, errNotRenewed)
	}
	if !w.pausesKnown.Load() {
		return fmt.Errorf("relay: worker %s: %w", w.owner, errPausesUnknown)
	}
	if s, ok := w.sink.(interface{ Ready() bool }); ok && !s.Ready() {
		return fmt.Errorf("relay: worker %s: %w", w.owner, errSinkNotReady)
	}
	return nil
}

var (
	errTables        = errors.New("the tables did not pass their check; see the log")
	errNotRenewed    = errors.New("the leases could not be renewed for longer than they last")
	errPausesUnknown = errors.New("it could not be read yet what operators have paused")
	errSinkNotReady  = errors.New("the sink does not reach its broker")
)

// unanswered reports whether an error did not come from the server: nobody knows if the
// call took effect, or if the next one reaches the same server.
func unanswered(err error) bool {
	return bounded.Silence(err) || errors.Is(err, context.Canceled) || sqlerr.Connection(err)
}

// transient reports whether an error says nothing about the tables: the call had no
// answer, lost against another transaction, or waited too long for one.
func transient(err error) bool {
	return unanswered(err) || sqlerr.TimedOut(err) || sqlerr.Retryable(err)
}
