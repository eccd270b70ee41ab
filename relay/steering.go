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

// steeringEvery is how often a worker reads what operators want: the pauses, and commands.
const steeringEvery = time.Second

// sinkOf returns the function that names the sink of a topic, nil if there is one sink.
func sinkOf(sink Sink) func(topic string) string {
	if s, ok := sink.(interface{ SinkOf(topic string) string }); ok {
		return s.SinkOf
	}
	return nil
}

// steering tells the loop what operators have paused. If a read fails, what was read last
// applies; before the first one nothing is published. Where the role may not read the pauses,
// nothing is paused, unless a pause is known.
func (w *worker) steering(ctx context.Context) error {
	s := &steering{worker: w}
	for {
		s.step(ctx)
		if !sleep.For(ctx, steeringEvery) {
			return nil
		}
	}
}

// steering is what a worker knows of the pauses.
type steering struct {
	*worker
	known bool // pauses were read, or may not be
	last  pauses

	forbidden bool // has been logged
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
}

// tell tells the loop what is paused, if that has changed.
func (s *steering) tell(ctx context.Context, found []steerstore.Target) {
	to := pausesOf(found)
	if s.known && to.equal(&s.last) {
		return
	}
	if !s.call(ctx, func(e *engine, now time.Time) { e.pause(to, now) }) {
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
