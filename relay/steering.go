package relay

import (
	"context"
	"log/slog"
	"strconv"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/steerstore"
)

// steeringEvery is how often a worker reads what operators want. Each of its steps is one
// statement, or two, of few rows.
const steeringEvery = time.Second

// sinkOf returns the function that names the sink of a topic, nil if there is one sink.
func sinkOf(sink Sink) func(topic string) string {
	if s, ok := sink.(interface{ SinkOf(topic string) string }); ok {
		return s.SinkOf
	}
	return nil
}

// steering tells the loop what operators have paused, and carries out their commands. If a
// read fails, what was read last applies; before the first one nothing is published. Where the
// role may not read the pauses, nothing is paused, unless a pause is known.
func (w *worker) steering(ctx context.Context) error {
	s := &steering{worker: w, released: map[int64]int64{}}
	for {
		s.step(ctx)
		if !sleep.For(ctx, steeringEvery) {
			return nil
		}
	}
}

// steering is what a worker knows of the operators' wishes.
type steering struct {
	*worker
	known bool // pauses were read, or may not be
	last  pauses

	forbidden bool // has been logged

	released map[int64]int64 // releases that this worker has begun, with the epoch of the lane
}

func (s *steering) step(ctx context.Context) {
	found, err := ask(ctx, s.worker, opSteer, func(ctx context.Context) ([]steerstore.Target, error) { return s.steers.Paused(ctx, "") })
	switch {
	case ctx.Err() != nil:
		return
	case sqlerr.Forbidden(err) && s.last.none():
		// A role of before there were pauses.
		if !s.forbidden {
			s.forbidden = true
			s.log.WarnContext(ctx, "pauses may not be read, so nobody can pause what this relay publishes; grant select on the table pauses", "error", err)
		}
		s.tell(ctx, nil)
	case err != nil:
		level, attrs := s.failed(&s.failing.pauses, slog.LevelWarn, err)
		s.log.Log(ctx, level, "pauses could not be read; those read last apply, and a worker that has read none publishes nothing", append(attrs, "error", err)...)
	default:
		if attrs, report := s.failing.pauses.Over(); report {
			s.log.InfoContext(ctx, "pauses are read again", attrs...)
		}
		s.forbidden = false
		s.tell(ctx, found)
	}
	err = s.carryOut(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		level, attrs := s.failed(&s.failing.commands, slog.LevelWarn, err)
		s.log.Log(ctx, level, "commands of operators could not be carried out; trying again", append(attrs, "error", err)...)
	default:
		if attrs, report := s.failing.commands.Over(); report {
			s.log.InfoContext(ctx, "commands of operators are carried out again", attrs...)
		}
	}
}

// tell tells the loop what is paused, if that has changed.
func (s *steering) tell(ctx context.Context, found []steerstore.Target) {
	to := pausesOf(found)
	if s.known && to.equal(&s.last) {
		return
	}
	if !s.inLoop(ctx, func(e *engine, now time.Time) { e.pause(to, now) }) {
		return
	}
	if len(found) > 0 || s.known {
		s.log.InfoContext(ctx, "pauses changed", "topics", len(to.topics), "sinks", len(to.sinks), "keys", len(to.keys), "lanes", to.countLanes())
	}
	if len(found) > steerstore.MostPauses {
		s.log.WarnContext(ctx, "more is paused than steer allows; it was written past it, and the first pauses apply, by kind and name", "pauses", len(found), "most", steerstore.MostApplied)
	}
	s.known, s.last = true, to
	s.pausesKnown.Store(true)
}

// inLoop runs fn in the loop, and reports whether it ran.
func (s *steering) inLoop(ctx context.Context, fn func(*engine, time.Time)) bool {
	done := make(chan struct{})
	select {
	case s.calls <- func(e *engine, now time.Time) { defer close(done); fn(e, now) }:
		<-done
		return true
	case <-ctx.Done():
		return false
	}
}

// pausesOf returns what concerns relays.
func pausesOf(found []steerstore.Target) pauses {
	to := pauses{topics: map[string]bool{}, sinks: map[string]bool{}, keys: map[string]bool{}}
	for _, p := range found {
		switch p.Kind {
		case steerstore.KindTopic:
			to.topics[p.Name] = true
		case steerstore.KindSink:
			to.sinks[p.Name] = true
		case steerstore.KindKey:
			to.keys[p.Name] = true
		case steerstore.KindLane:
			if n, err := strconv.Atoi(p.Name); err == nil && n >= 0 && n < len(to.lanes) {
				to.lanes[n] = true
			}
		}
	}
	return to
}

// none reports whether nothing is paused.
func (p *pauses) none() bool {
	return len(p.topics)+len(p.sinks)+len(p.keys)+p.countLanes() == 0
}

func (p *pauses) countLanes() (n int) {
	for _, paused := range p.lanes {
		if paused {
			n++
		}
	}
	return n
}
