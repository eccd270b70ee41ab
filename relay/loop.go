package relay

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/outboxstore"
)

type reported struct {
	*entry
	err error
}

type readAnswer struct {
	read    *read
	entries []*entry
	err     error
}

// windows returns how many messages may be in flight at sink, and of one lane.
func windows(configured int, sink Sink) (window, ofLane int) {
	window = configured
	if s, ok := sink.(interface{ MaxInFlight() int }); ok {
		window = min(window, s.MaxInFlight())
	}
	ofLane = window
	if s, ok := sink.(laneBound); ok {
		if most := s.mostOfLane(); most < math.MaxInt { // a small window is for several lanes, too
			ofLane = min(most, max(1, window/4))
		}
	}
	return window, ofLane
}

// loop is the only owner of the engine.
func (w *worker) loop(ctx context.Context) error {
	window, ofLane := windows(w.cfg.Window, w.sink)
	var reachable func() bool
	if s, ok := w.sink.(interface{ Ready() bool }); ok {
		reachable = s.Ready
	}
	e := newEngine(limits{
		window: window, laneWindow: ofLane, laneRows: w.cfg.Batch, quickRead: w.health.full / 4, laneBytes: laneBytes, removeRows: removeRows,
		linger: linger, lease: w.cfg.Lease, reserve: w.cfg.Lease / 3, pollMin: w.cfg.PollMin, pollMax: w.cfg.PollMax,
		order: w.cfg.Order, attempts: w.cfg.Retry, dropUnroutable: w.cfg.DropUnroutable, owner: w.owner,
		reachable: reachable, awaitPauses: true, sinkOf: sinkOf(w.sink),
	})
	e.circuits.changed = func(topic string, cause error) {
		w.failing.topics.changed(ctx, w.log, topic, cause)
	}
	e.circuits.becameUnclear = func(m *entry, cause error) {
		if !w.log.Enabled(ctx, slog.LevelDebug) {
			return
		}
		log := w.log.With("topic", m.Topic, "lane", m.Lane, "id", m.ID, "message_id", m.MessageID, "key", m.Key)
		if cause == nil {
			log.DebugContext(ctx, "message confirmed after all")
			return
		}
		log.DebugContext(ctx, "publish failed; retrying to find out whether the message or the topic is at fault", "error", cause)
	}
	wake, unlisten := w.queue.Listen()
	defer unlisten()
	timer := time.NewTimer(0)
	defer timer.Stop()
	contexts := newPublishContexts(ctx, w.cfg.PublishTimeout)
	defer contexts.end()
	circuits := circuitCount{gauge: &w.met.circuits}
	defer circuits.set(0, 0, 0)
	defer w.tracing.endAll()
	for {
		now := time.Now()
		contexts.endLapsed(e, now)
		w.handleOutcomes(ctx, e, now)
		w.step(e, now, contexts) //nolint:contextcheck // the contexts derive from ctx
		circuits.count(&e.circuits, now)
		timer.Reset(time.Until(e.wakeAt(now)))
		select {
		case <-ctx.Done():
			return nil
		case <-w.reported:
		case <-timer.C:
		case <-wake:
			e.wake()
		case <-w.health.back:
			e.databaseBack(time.Now())
		case answer := <-w.rows:
			e.read(answer.read, answer.entries, time.Now(), answer.err)
		case answer := <-w.answers:
			e.removed(time.Now(), answer)
		case answer := <-w.taskAnswers:
			e.taskDone(time.Now(), answer)
		case call := <-w.calls:
			call(e, time.Now())
		}
	}
}

// call runs fn in the loop, waits for it, and reports whether it ran. If the loop hangs, for
// example in a sink that blocks, the caller's step fails, and with it the renewal of the
// leases. A loop that has taken fn runs it.
func (w *worker) call(ctx context.Context, fn func(*engine, time.Time)) bool {
	done := make(chan struct{})
	select {
	case w.calls <- func(e *engine, now time.Time) { defer close(done); fn(e, now) }:
		<-done
		return true
	case <-ctx.Done():
		return false
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
		w.publish(ctx, entries, now)
	}
	// The channels have room: at most one request of each kind is running.
	if refs := e.removals.next(now, e.publishing.inFlight == 0); refs != nil {
		w.removes <- refs
	}
	if c := e.nextTask(now); c != nil {
		w.tasks <- c
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
func (w *worker) publish(ctx context.Context, entries []*entry, now time.Time) {
	messages := make([]*Message, 0, len(entries))
	copies := make([]Message, len(entries))
	for i, m := range entries {
		// Decoded here and not by the reader, whose time determines how fast a backlog
		// is read.
		if m.Metadata, m.malformed = outboxstore.DecodeMetadata(m.metadata); m.malformed != nil {
			m.handed = time.Time{}
			w.done(&m.Message, Refused(m.malformed))
			continue
		}
		w.tracing.begin(ctx, m)
		m.handed = now
		copies[i] = m.Message
		messages = append(messages, &copies[i])
	}
	if len(messages) > 0 {
		w.sink.Publish(ctx, messages, w.done)
		crashpoint.Reach(crashpoint.AfterTransmit)
	}
}

// handleOutcomes handles the outcomes that the sink has reported.
func (w *worker) handleOutcomes(ctx context.Context, e *engine, now time.Time) {
	w.mu.Lock()
	outcomes := w.outcomes
	w.outcomes, w.spare = w.spare[:0], nil
	w.mu.Unlock()
	defer func() {
		clear(outcomes)
		w.spare = outcomes
	}()
	if len(outcomes) == 0 {
		return
	}
	crashpoint.Reach(crashpoint.AfterOutcome)
	var counts tally
	each := w.log.Enabled(ctx, slog.LevelDebug)
	for _, o := range outcomes {
		counts.add(o.err)
		w.tracing.end(o.entry, o.err)
		if o.state == stateInFlight {
			w.durations.record(ctx, o.entry, now, o.err)
			if o.err == nil && each {
				w.log.DebugContext(ctx, "message relayed", "topic", o.Topic, "lane", o.Lane, "id", o.ID, "message_id", o.MessageID, "key", o.Key, "took", now.Sub(o.handed))
			}
		}
		e.outcome(o.entry, now, o.err)
	}
	w.met.record(ctx, counts)
	w.happened.delivered.Add(counts.confirmed)
	w.happened.failed.Add(counts.unavailable + counts.unroutable + counts.unknown)
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
