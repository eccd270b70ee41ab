package relay

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/internal/steerstore"
)

const (
	// hastenedAtOnce bounds what one statement makes due.
	hastenedAtOnce = 500

	// hastenedInStep bounds what one step makes due of a lane; the next one goes on.
	hastenedInStep = 20_000
)

// handovers are the lanes that operators have had workers give back, until another worker has
// taken them. operators.carryOut writes them, the leaser reads them.
type handovers struct {
	mu    sync.Mutex     // guards what follows
	by    map[int]string // lanes, and who gave them back
	taken map[int]bool   // that this worker has taken from others: they are the last to go
}

func (h *handovers) all() map[int]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.by)
}

func (h *handovers) set(by map[int]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.by = by
}

// gives records that a worker gives a lane back. The leaser may look for lanes before the commands
// are read again.
func (h *handovers) gives(lane int, worker string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.by == nil {
		h.by = map[int]string{}
	}
	h.by[lane] = worker
}

func (h *handovers) took(lane int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.taken == nil {
		h.taken = map[int]bool{}
	}
	h.taken[lane] = true
}

// keepFirst returns the lanes with those first that were taken from others for an operator:
// where a worker has too many, it gives back the last ones.
func (h *handovers) keepFirst(lanes []int) []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.taken)+len(h.by) == 0 {
		return lanes
	}
	sorted := slices.Clone(lanes)
	rank := func(lane int) int {
		if h.taken[lane] || h.by[lane] != "" {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(sorted, func(a, b int) int { return rank(a) - rank(b) })
	return sorted
}

// operators carries out commands of operators. Pauses do not wait for it; see steering.
func (w *worker) operators(ctx context.Context) error {
	s := &operators{worker: w, released: map[int64]int64{}}
	for {
		err := s.carryOut(ctx)
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
		if !sleep.For(ctx, steeringEvery) {
			return nil
		}
	}
}

// operators is what a worker remembers of the commands.
type operators struct {
	*worker
	released map[int64]int64 // releases that this worker has begun, with the epoch of the lane
}

// carryOut carries out the commands on lanes of this worker. After a failure the other commands
// of the lane wait, so that they do not keep those of other lanes.
func (s *operators) carryOut(ctx context.Context) error {
	commands, err := ask(ctx, s.worker, opCommand, s.steers.Commands)
	if err != nil {
		return err
	}
	given := map[int]string{}
	for _, c := range commands {
		if c.Action == steerstore.ActionRelease && c.Worker != "" {
			given[c.Lane] = c.Worker
		}
	}
	s.handovers.set(given)
	if len(commands) == 0 {
		return nil
	}
	epochs := map[int]int64{}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, l := range e.lanes {
			if l != nil && l.loaded && !l.draining {
				epochs[number] = l.epoch
			}
		}
	})
	var errs []error
	for _, c := range commands {
		epoch, mine := epochs[c.Lane]
		if !mine {
			continue
		}
		var err error
		switch c.Action {
		case steerstore.ActionRetry:
			err = s.retryNow(ctx, c, relaystore.Fence{Lane: c.Lane, Owner: s.owner, Epoch: epoch})
		case steerstore.ActionRelease:
			err = s.release(ctx, c, epoch)
		}
		if err != nil {
			delete(epochs, c.Lane)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// retryNow makes retrying messages due, and has circuits probe.
func (s *operators) retryNow(ctx context.Context, c steerstore.Command, f relaystore.Fence) error {
	for made := 0; made < hastenedInStep; {
		n, err := ask(ctx, s.worker, opCommand, func(ctx context.Context) (int, error) {
			return s.hasten.RetryNow(ctx, f, relaystore.Hastening{Topic: c.Topic, Key: c.Key, Asked: c.Asked}, hastenedAtOnce)
		})
		if errors.Is(err, relaystore.ErrFenced) {
			return nil // for the new owner
		}
		if err != nil {
			return err
		}
		s.call(ctx, func(e *engine, now time.Time) { e.retryNow(c.Topic, now) })
		if made += n; n < hastenedAtOnce {
			return s.end(ctx, c)
		}
	}
	return nil
}

// release begins to give a lane back, or ends the command once the lane has changed hands.
func (s *operators) release(ctx context.Context, c steerstore.Command, epoch int64) error {
	_, began := s.released[c.ID]
	switch {
	case c.Worker == "", c.Worker == s.owner && !began: // or the answer was lost
		begun, err := ask(ctx, s.worker, opCommand, func(ctx context.Context) (bool, error) {
			return s.steers.BeginRelease(ctx, c.ID, s.owner)
		})
		if err != nil || !begun {
			return err
		}
		s.released[c.ID] = epoch
		s.handovers.gives(c.Lane, s.owner)
		s.call(ctx, func(e *engine, _ time.Time) {
			if l := e.lanes[c.Lane]; l != nil && l.epoch == epoch {
				e.drain(c.Lane)
			}
		})
		s.log.InfoContext(ctx, "lane released by an operator", "lane", c.Lane)
		return nil
	case c.Worker != s.owner:
		s.handovers.took(c.Lane)
	case s.released[c.ID] == epoch: // not drained yet
		return nil
	}
	err := s.end(ctx, c)
	if err == nil {
		delete(s.released, c.ID)
	}
	return err
}

func (s *operators) end(ctx context.Context, c steerstore.Command) error {
	_, err := ask(ctx, s.worker, opCommand, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.steers.End(ctx, c.ID) })
	return err
}

// retryNow looks for what is due now, and lets the circuits of a topic, or all, probe at once.
func (e *engine) retryNow(topic string, now time.Time) {
	e.due.lookFromStart(now)
	for _, t := range e.circuits.topics {
		if topic == "" || t.name == topic {
			t.retryAt = time.Time{}
			t.retry.Reset()
		}
	}
	if e.circuits.sinkDown {
		e.circuits.sinkRetryAt = time.Time{}
		e.circuits.sinkRetry.Reset()
	}
}
