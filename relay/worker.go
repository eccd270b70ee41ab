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
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxqueue"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/steerstore"
)

// worker is one run of a relay. run starts its goroutines and waits for all of them:
//
//	loop    owns the engine: turns outcomes, rows and wake-ups into the next
//	        publish, read and deletion
//	reader  does the reads, one at a time
//	remover does the deletions, one at a time
//	taskRunner runs the tasks, one at a time: retrying messages, dead letters
//	leaser  owns the leases: heartbeat, shares, hand-over; ends the run
//	upkeep  maintains the tables, while this worker has the lease for it
//	scheduler moves scheduled messages that are due, under the same lease
//	doctor  makes the worker fit again when the database answers
//	archiver archives rows past the history's retention, under the same lease
//	steering reads what is paused once a second, and tells the loop
//	operators carries out operators' commands: releases of lanes, retries
//	jobs     runs replay jobs of dead letters, under the same lease
//	gauge    reads the backlog for the metrics while they are collected, under the same lease
//	summarize logs once a minute what has happened
//	sink    runs the sink's own connections
//
// The others communicate with the loop over channels; only the list of outcomes is
// shared.
type worker struct {
	cfg         Config
	sink        Sink
	queue       *outboxqueue.Queue
	leases      relaystore.Leases
	store       taskStore
	deadLetters *dlq.Store
	observed    relaystore.Observations
	openLetters func(ctx context.Context, most int) ([]dlqstore.OpenCount, error)
	steers      steerstore.Store
	hasten      relaystore.Hasten
	owner       string
	log         *slog.Logger
	met         *metrics

	tracing   tracing
	failing   failing
	happened  happened
	durations durations

	bounds *bounded.Calls
	health health

	check func(context.Context) error
	// checkDue makes the reader check the tables before it reads on: at the start,
	// after an outage of the database (it may be another server now), and when the
	// upkeep finds something wrong with them.
	checkDue atomic.Bool

	calls       chan func(*engine, time.Time) // run by the loop
	drained     chan struct{}                 // a draining lane became idle
	reads       chan *read
	rows        chan readAnswer
	removes     chan []outboxstore.Ref
	answers     chan removeAnswer
	tasks       chan *task
	taskAnswers chan taskAnswer

	mu       sync.Mutex // guards outcomes
	outcomes []reported
	spare    []reported // reuses their memory; belongs to the loop
	reported chan struct{}

	// unfit is set if the tables did not pass their check. This worker then reads
	// nothing, and another one may have the lanes.
	unfit atomic.Bool

	upkeepLease upkeepLease
	handovers   handovers

	// pausesKnown is set once the pauses were read; nothing is published before.
	pausesKnown atomic.Bool
	renewedAt   atomic.Int64 // when the last heartbeat succeeded, Unix nanoseconds; 0: none has
}

func newWorker(r *Relay) *worker {
	store := storeOf(r.box)
	w := &worker{
		cfg: r.cfg, sink: r.sink, queue: outboxqueue.Of(r.box), leases: store, store: store, hasten: store, observed: store, deadLetters: r.deadLetters, met: r.met, tracing: newTracing(r.cfg), durations: newDurations(r.met),
		openLetters: dlqstore.Open(r.box.DB(), database.Of(r.box.Config().Database)).CountOpen,
		steers:      steerstore.Open(r.box.DB(), database.Of(r.box.Config().Database)),
		owner:       rand.Text(),
		bounds:      bounded.Over(r.box.DB(), maxAbandoned),
		health:      newHealth(r.cfg.Lease),
		calls:       make(chan func(*engine, time.Time)),
		drained:     make(chan struct{}, 1),
		reads:       make(chan *read, 1),
		rows:        make(chan readAnswer, 1),
		removes:     make(chan []outboxstore.Ref, 1),
		answers:     make(chan removeAnswer, 1),
		tasks:       make(chan *task, 1),
		taskAnswers: make(chan taskAnswer, 1),
		reported:    make(chan struct{}, 1),
	}
	w.log = r.cfg.Logger.With("worker", w.name())
	w.check = func(ctx context.Context) error {
		if err := oncemill.CheckMigrated(ctx, r.box.DB(), r.box.Config().Database, dlq.Migrations, Migrations); err != nil {
			return err
		}
		if err := w.queue.Check(ctx); err != nil {
			return err
		}
		return relaystore.CheckSequences(ctx, store, w.queue)
	}
	w.checkDue.Store(true)
	return w
}

// prepare waits until the database answers, and returns errors that waiting cannot fix.
func (w *worker) prepare(ctx context.Context) error {
	retry := newBackOff()
	var failures repeats.Series
	for {
		err := do(ctx, w, opCheck, w.check)
		if err == nil {
			if attrs, report := failures.Over(); report {
				w.log.InfoContext(ctx, "database is available", attrs...)
			}
			w.makeRoom(ctx)
			return nil
		}
		if ctx.Err() == nil && !transient(err) {
			return fmt.Errorf("relay: %w", err)
		}
		if !sleep.For(ctx, retry.NextBackOff()) {
			return nil // ctx ended while it waited
		}
		level, attrs := failures.Failed(slog.LevelWarn, err.Error())
		w.log.Log(ctx, level, "database is not available; trying again", append(attrs, "error", err)...)
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
	group.Go(func() error { return w.taskRunner(working) })
	group.Go(func() error { return w.upkeep(working) })
	group.Go(func() error { return w.scheduler(working) })
	group.Go(func() error { return w.archiver(working) })
	group.Go(func() error { return w.steering(working) })
	group.Go(func() error { return w.operators(working) })
	group.Go(func() error { return w.jobs(working) })
	group.Go(func() error { return w.gauge(working) })
	group.Go(func() error { return w.doctor(working) })
	group.Go(func() error { return w.summarize(working) })
	group.Go(func() error {
		err := newLeaser(w).run(stopping, working)
		endSink()
		<-sinkDone
		if err != nil {
			return err
		}
		return errStopped
	})
	w.log.InfoContext(ctx, "relay started", "owner", w.owner)
	err := group.Wait()
	w.summarizeRest(ctx)
	w.log.InfoContext(ctx, "relay stopped")
	if !errors.Is(err, errStopped) {
		return err
	}
	return sinkErr
}
