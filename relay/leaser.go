package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/relaystore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// leaser keeps a worker's leases. Only it asks the database for them; it passes to the
// loop which lanes it may work.
type leaser struct {
	*worker
	stopping bool
	readOnly bool // the database takes no writes; logged once

	formerExpired bool // those of the former worker with this name

	last heartbeat

	leasesSeen  map[int]seen[relaystore.Lease]
	workersSeen map[string]seen[relaystore.Worker]
}

// heartbeat is the result of the last heartbeat. If it failed, sentAt is zero.
type heartbeat struct {
	sentAt time.Time
	as     relaystore.Identity
	epochs map[int]int64
	upkeep int64
}

// stands reports whether a heartbeat need not be repeated yet.
func (h *heartbeat) stands(now time.Time, as relaystore.Identity, epochs map[int]int64, upkeep int64, lease time.Duration) bool {
	return now.Sub(h.sentAt) < lease/5 && as == h.as && upkeep == h.upkeep && maps.Equal(epochs, h.epochs)
}

// seen is a value that has been unchanged since a time of the leaser's own clock.
type seen[T any] struct {
	value T
	since time.Time
}

func newLeaser(w *worker) *leaser {
	return &leaser{worker: w, leasesSeen: map[int]seen[relaystore.Lease]{}, workersSeen: map[string]seen[relaystore.Worker]{}}
}

// holding is the loop's report on its lanes.
type holding struct {
	active   []int         // held, not draining; the last ones are given back first
	renew    []int         // active and draining ones, except those that hang
	epochs   map[int]int64 // of all that are held
	released map[int]int64 // drained and dropped just now
	unsure   []int         // of those: the next worker may send again what has arrived
	atRest   bool          // nothing arrives, and nothing is in flight
	hung     bool          // the sink owes outcomes that are long overdue: no place for more
	unfit    bool          // for so long that lanes which cannot be drained are given up
	mayHold  [outbox.Lanes]bool
}

// run sends heartbeats until stopping ends, then hands the lanes back. Steps are
// frequent enough that several may fail before a lease expires. The statements run
// under working. The error is one that no heartbeat can repair.
func (s *leaser) run(stopping, working context.Context) error {
	every := s.cfg.Lease / 15
	for {
		if err := s.try(working); errors.Is(err, oncemill.ErrDatabaseReplaced) {
			return fmt.Errorf("relay: %w", err)
		}
		timer := time.NewTimer(every)
		select {
		case <-timer.C:
			continue
		case <-s.drained:
			timer.Stop()
			continue
		case <-stopping.Done():
			timer.Stop()
		}
		break
	}
	ctx, cancel := context.WithTimeout(working, s.cfg.StopTimeout)
	defer cancel()
	s.stop(ctx)
	// The final calls get a little extra time.
	last, cancelLast := context.WithTimeout(working, time.Second)
	defer cancelLast()
	s.leave(last)
	return nil
}

// stop drains all lanes and waits until nothing is in flight or ctx ends.
func (s *leaser) stop(ctx context.Context) {
	s.stopping = true
	for {
		s.call(ctx, func(e *engine, _ time.Time) {
			for _, l := range e.lanes {
				if l != nil {
					e.drain(l.number)
				}
			}
		})
		_ = s.try(ctx) // try logs the error
		held := 0
		known := s.call(ctx, func(e *engine, _ time.Time) {
			for _, l := range e.lanes {
				if l != nil {
					held++
				}
			}
		})
		if known && held == 0 {
			return
		}
		timer := time.NewTimer(s.cfg.Lease / 15)
		select {
		case <-timer.C:
		case <-s.drained:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			s.log.WarnContext(ctx, "stopping with messages that the broker has not answered; they stay in the outbox", "lanes", held)
			return
		}
	}
}

// leave releases the remaining leases, so that nobody has to wait for them to expire.
// Lanes with unanswered messages are released too: the next owner sends those again,
// sooner rather than later. A lane that the loop no longer holds is still the worker's if an earlier
// release failed, and nobody remembers what was in it.
func (s *leaser) leave(ctx context.Context) {
	sure := []int{relaystore.UpkeepLane}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, l := range e.lanes {
			if l != nil && !l.isUnsure() {
				sure = append(sure, number)
			}
			e.drop(number)
		}
	})
	s.upkeepLease.hold(0)
	err := do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error { return s.leases.Leave(ctx, s.owner, sure) })
	if err != nil {
		s.log.WarnContext(ctx, "leases could not be given back; they expire", "error", err)
	}
}

// errHung fails the heartbeat of a worker whose loop does not respond.
var errHung = errors.New("the worker's loop does not answer; does its sink's Publish block?")

// try runs a step within a part of the lease and logs the first failure of a series.
func (s *leaser) try(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.cfg.Lease/3)
	defer cancel()
	err := s.step(limited)
	readOnly := sqlerr.ReadOnly(err)
	switch {
	case err == nil:
		if attrs, report := s.failing.heartbeats.Over(); report || s.readOnly {
			s.log.InfoContext(ctx, "leases are renewed again", attrs...)
		}
		s.readOnly = false
	case ctx.Err() == nil && readOnly && !s.readOnly:
		s.readOnly = true
		s.checkDue.Store(true) // another server, or its role changed
		s.log.ErrorContext(ctx, "the database is read-only; nothing is published until this worker is connected to a server that takes writes",
			"error", fmt.Errorf("%w: %w", outbox.ErrReadOnly, err))
	case ctx.Err() == nil && !readOnly:
		level, attrs := s.failing.heartbeats.Failed(slog.LevelWarn, err.Error())
		s.log.Log(ctx, level, "leases could not be renewed; publishing stops when they expire", append(attrs, "error", err)...)
	}
	return err
}
