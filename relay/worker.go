package relay

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

// worker is one run of a relay. run starts its goroutines and waits for all of them:
//
//	loop    owns the engine: turns outcomes, rows and wake-ups into the next
//	        publish, read and deletion
//	reader  does the reads, one at a time
//	remover does the deletions, one at a time
//	parker  does the chores, one at a time: parked rows, dead letters
//	leaser  owns the leases: heartbeat, shares, hand-over; ends the run
//	upkeep  maintains the tables, while this worker has the lease for it
//	mover   moves scheduled messages that are due, under the same lease
//	doctor  makes the worker fit again when the database answers
//	archiver archives rows past the history's retention, under the same lease
//	sink    runs the sink's own connections
//
// The others communicate with the loop over channels; only the list of outcomes is
// shared.
type worker struct {
	cfg     Config
	sink    Sink
	queue   *outboxqueue.Queue
	leases  leaseStore
	store   parkingStore
	letters *dlq.Store
	owner   string
	log     *slog.Logger
	met     *metrics

	tracing tracing

	bounds *bounded.Calls
	health health

	check func(context.Context) error
	// checkDue makes the reader check the tables before it reads on: at the start,
	// after an outage of the database (it may be another server now), and when the
	// upkeep finds something wrong with them.
	checkDue atomic.Bool

	calls   chan func(*engine, time.Time) // run by the loop
	drained chan struct{}                 // a draining lane became idle
	reads   chan *read
	rows    chan readAnswer
	removes chan []outboxstore.Ref
	answers chan removeAnswer
	chores  chan *chore
	chored  chan choreAnswer

	mu       sync.Mutex // guards outcomes
	outcomes []reported
	settled  []reported // reuses their memory; belongs to the loop
	reported chan struct{}

	// unfit is set if the tables did not pass their check. This worker then reads
	// nothing, and another one may have the lanes.
	unfit atomic.Bool

	tending   tending
	renewedAt atomic.Int64 // when the last heartbeat succeeded, Unix nanoseconds; 0: none has
}

type reported struct {
	*entry
	err error
}

type readAnswer struct {
	read    *read
	entries []*entry
	err     error
}

func newWorker(r *Relay) *worker {
	w := &worker{
		cfg: r.cfg, sink: r.sink, queue: outboxqueue.Of(r.box), leases: newLeaseStore(r.box), store: newParkingStore(r.box), letters: r.letters, met: r.met, tracing: newTracing(r.cfg),
		owner:    rand.Text(),
		bounds:   bounded.New(maxAbandoned),
		health:   newHealth(r.cfg.Lease),
		calls:    make(chan func(*engine, time.Time)),
		drained:  make(chan struct{}, 1),
		reads:    make(chan *read, 1),
		rows:     make(chan readAnswer, 1),
		removes:  make(chan []outboxstore.Ref, 1),
		answers:  make(chan removeAnswer, 1),
		chores:   make(chan *chore, 1),
		chored:   make(chan choreAnswer, 1),
		reported: make(chan struct{}, 1),
	}
	w.log = r.cfg.Logger.With("worker", w.owner)
	w.check = func(ctx context.Context) error {
		if err := oncemill.CheckMigrated(ctx, r.box.DB(), r.box.Config().Database, dlq.Migrations, Migrations); err != nil {
			return err
		}
		if err := w.queue.Check(ctx); err != nil {
			return err
		}
		return checkSequence(ctx, r.box)
	}
	w.checkDue.Store(true)
	return w
}

// prepare waits until the database answers, and returns errors that waiting cannot fix.
func (w *worker) prepare(ctx context.Context) error {
	retry := newBackOff()
	level := slog.LevelWarn
	for {
		err := do(ctx, w, opCheck, w.check)
		if err == nil {
			if level != slog.LevelWarn {
				w.log.InfoContext(ctx, "database is available")
			}
			w.makeRoom(ctx)
			return nil
		}
		if ctx.Err() == nil && !passing(err) {
			return fmt.Errorf("relay: %w", err)
		}
		if !pause(ctx, retry.NextBackOff()) {
			return nil // told to stop while it waited
		}
		w.log.Log(ctx, level, "database is not available; trying again", "error", err)
		level = slog.LevelDebug // once is enough
	}
}

// makeRoom creates the history's partitions before the first message is moved there. It
// does not need the upkeep's lease: doing it twice is safe.
func (w *worker) makeRoom(ctx context.Context) {
	err := do(ctx, w, opUpkeep, func(ctx context.Context) error {
		_, err := w.queue.Maintain(ctx, func(context.Context, *sql.Tx) (bool, error) { return true, nil })
		return err
	})
	if err != nil && ctx.Err() == nil {
		w.log.WarnContext(ctx, "upkeep of the outbox failed; trying again", "error", err)
	}
}

// pause waits for d and reports whether it did so before ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// errStopped ends the group of goroutines after a clean stop.
var errStopped = errors.New("stopped")

func (w *worker) run(ctx context.Context) error {
	// Messages in flight outlive ctx, until the leaser has ended the run.
	group, working := errgroup.WithContext(context.WithoutCancel(ctx))
	stopping, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(working, stop)() // a failed sink stops the rest cleanly

	sinkContext, endSink := context.WithCancel(context.WithoutCancel(ctx))
	defer endSink()
	var sinkErr error
	sinkDone := make(chan struct{})
	group.Go(func() error {
		defer close(sinkDone)
		if err := w.sink.Run(sinkContext); err != nil {
			sinkErr = fmt.Errorf("relay: sink: %w", err)
		} else if sinkContext.Err() == nil {
			sinkErr = errors.New("relay: sink: Run returned while it was needed")
		}
		stop()
		return nil
	})
	group.Go(func() error { return w.loop(working) })
	group.Go(func() error { return w.reader(working) })
	group.Go(func() error { return w.remover(working) })
	group.Go(func() error { return w.parker(working) })
	group.Go(func() error { return w.upkeep(working) })
	group.Go(func() error { return w.mover(working) })
	group.Go(func() error { return w.archiver(working) })
	group.Go(func() error { return w.doctor(working) })
	group.Go(func() error {
		err := newLeaser(w).run(stopping, working)
		endSink()
		<-sinkDone
		if err != nil {
			return err
		}
		return errStopped
	})
	if err := group.Wait(); !errors.Is(err, errStopped) {
		return err
	}
	return sinkErr
}

// loop is the only owner of the engine.
func (w *worker) loop(ctx context.Context) error {
	window := w.cfg.Window
	if s, ok := w.sink.(interface{ MaxInFlight() int }); ok {
		window = min(window, s.MaxInFlight())
	}
	var reachable func() bool
	if s, ok := w.sink.(interface{ Ready() bool }); ok {
		reachable = s.Ready
	}
	e := newEngine(limits{
		window: window, laneRows: w.cfg.Batch, quickRead: w.health.full / 4, laneBytes: laneBytes, removeRows: removeRows,
		linger: linger, reserve: w.cfg.Lease / 3, pollMin: w.cfg.PollMin, pollMax: w.cfg.PollMax,
		order: w.cfg.Order, attempts: w.cfg.Retry, unroutable: w.cfg.Unroutable, owner: w.owner,
		reachable: reachable,
	})
	e.changed = func(topic string, cause error) {
		if cause == nil {
			w.log.InfoContext(ctx, "topic is available again", "topic", topic)
			return
		}
		w.log.WarnContext(ctx, "topic is unavailable; nothing is lost, its messages wait", "topic", topic, "error", cause)
	}
	e.suspected = func(m *entry, cause error) {
		log := w.log.With("topic", m.Topic, "lane", m.Lane, "id", m.ID, "message_id", m.MessageID)
		if cause == nil {
			log.InfoContext(ctx, "message has passed after all")
			return
		}
		log.WarnContext(ctx, "message failed and is tried again; what else fails of its topic will tell whose fault it is", "error", cause)
	}
	wake, unlisten := w.queue.Listen()
	defer unlisten()
	timer := time.NewTimer(0)
	defer timer.Stop()
	contexts := newPublishContexts(ctx, w.cfg.PublishTimeout)
	defer contexts.end()
	for {
		now := time.Now()
		contexts.endLapsed(e, now)
		w.settle(ctx, e, now)
		w.step(e, now, contexts) //nolint:contextcheck // the contexts derive from ctx
		timer.Reset(time.Until(e.due(now)))
		select {
		case <-ctx.Done():
			return nil
		case <-w.reported:
		case <-timer.C:
		case <-wake:
			e.wake()
		case answer := <-w.rows:
			e.read(answer.read, answer.entries, time.Now(), answer.err)
		case answer := <-w.answers:
			e.removed(time.Now(), answer)
		case answer := <-w.chored:
			e.choreDone(time.Now(), answer)
		case call := <-w.calls:
			call(e, time.Now())
		}
	}
}

const (
	laneBytes  = 1 << 20
	removeRows = 4000
	linger     = 20 * time.Millisecond
)

// step starts everything that can be started: publishes, and the requests to reader and
// remover.
func (w *worker) step(e *engine, now time.Time, contexts *publishContexts) {
	w.requestRead(e, now)
	for {
		entries := e.nextPublish(now, now.Add(w.cfg.PublishTimeout))
		if entries == nil {
			break
		}
		ctx, until := contexts.of(entries[0].lane, now)
		for _, m := range entries {
			m.deadline = until
		}
		w.publish(ctx, entries)
	}
	// The channels have room: at most one request of each kind is running.
	if refs := e.nextRemoval(now); refs != nil {
		w.removes <- refs
	}
	if c := e.nextChore(now); c != nil {
		w.chores <- c
	}
	w.requestRead(e, now) // for lanes that have published what they had
	for _, l := range e.lanes {
		if l != nil && l.draining && e.idle(l) {
			raise(w.drained)
			break
		}
	}
}

func (w *worker) requestRead(e *engine, now time.Time) {
	if r := e.nextRead(now); r != nil {
		w.reads <- r
	}
}

// publish hands entries to the sink. An entry that cannot become a message already has
// its outcome.
//
// The sink gets a copy of each. It may keep that after the outcome, for a late confirm,
// when the payload is no longer needed here.
func (w *worker) publish(ctx context.Context, entries []*entry) {
	messages := make([]*Message, 0, len(entries))
	copies := make([]Message, len(entries))
	for i, m := range entries {
		// Decoded here and not by the reader, whose time determines how fast a backlog
		// is read.
		if m.Metadata, m.malformed = outboxstore.DecodeMetadata(m.metadata); m.malformed != nil {
			w.done(&m.Message, Refused(m.malformed))
			continue
		}
		w.tracing.begin(ctx, m)
		copies[i] = m.Message
		messages = append(messages, &copies[i])
	}
	if len(messages) > 0 {
		w.sink.Publish(ctx, messages, w.done)
	}
}

// settle handles the outcomes that the sink has reported.
func (w *worker) settle(ctx context.Context, e *engine, now time.Time) {
	w.mu.Lock()
	outcomes := w.outcomes
	w.outcomes, w.settled = w.settled[:0], nil
	w.mu.Unlock()
	defer func() {
		clear(outcomes)
		w.settled = outcomes
	}()
	if len(outcomes) == 0 {
		return
	}
	var counts tally
	for _, o := range outcomes {
		counts.add(o.err)
		w.tracing.end(o.entry, o.err)
		e.outcome(o.entry, now, o.err)
	}
	w.met.record(ctx, counts)
}

// done is the function that sinks report outcomes to.
func (w *worker) done(m *Message, err error) {
	if m.entry == nil {
		return // not a message of ours
	}
	w.mu.Lock()
	w.outcomes = append(w.outcomes, reported{m.entry, err})
	w.mu.Unlock()
	raise(w.reported)
}

// raise signals a channel of capacity one, unless it is already signaled.
func raise(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
