package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/outbox"
)

// leaser keeps a worker's leases. Only it asks the database for them; it passes to the
// loop which lanes it may work.
type leaser struct {
	*worker
	stopping bool
	failing  bool // the last step failed; logged once
	readOnly bool // because the database takes no writes; logged once, too

	formerExpired bool // those of the former worker with this name

	leasesSeen  map[int]seen[lease]
	workersSeen map[string]seen[peer]
}

// seen is a value that has been unchanged since a time of the leaser's own clock.
type seen[T any] struct {
	value T
	since time.Time
}

func newLeaser(w *worker) *leaser {
	return &leaser{worker: w, leasesSeen: map[int]seen[lease]{}, workersSeen: map[string]seen[peer]{}}
}

// holding is the loop's report on its lanes.
type holding struct {
	active   []int         // held, not draining; sorted
	renew    []int         // active and draining ones, except those that hang
	epochs   map[int]int64 // of all that are held
	released []int         // drained and dropped just now
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
			s.log.WarnContext(ctx, "stopping with messages that the broker has not answered; they stay owed", "lanes", held)
			return
		}
	}
}

// leave releases the remaining leases, so that nobody has to wait for them to expire.
// Lanes with unanswered messages are released too: the next owner sends those again,
// sooner rather than later.
func (s *leaser) leave(ctx context.Context) {
	lanes := []int{upkeepLane}
	for number := range outbox.Lanes {
		lanes = append(lanes, number)
	}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number := range e.lanes {
			e.drop(number)
		}
	})
	s.tending.hold(0)
	err := do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error {
		if err := s.leases.release(ctx, s.owner, lanes); err != nil {
			return err
		}
		return s.leases.leave(ctx, s.owner)
	})
	if err != nil {
		s.log.WarnContext(ctx, "leases could not be given back; they expire", "error", err)
	}
}

// call runs fn in the worker's loop, waits for it, and reports whether fn ran. If the
// loop hangs, for example in a sink that blocks, the caller's step fails, and with it
// the renewal. A loop that has taken fn runs it.
func (s *leaser) call(ctx context.Context, fn func(*engine, time.Time)) bool {
	done := make(chan struct{})
	select {
	case s.calls <- func(e *engine, now time.Time) { defer close(done); fn(e, now) }:
		<-done
		return true
	case <-ctx.Done():
		return false
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
		if s.failing {
			s.log.InfoContext(ctx, "leases are renewed again")
		}
		s.failing, s.readOnly = false, false
	case ctx.Err() == nil && readOnly && !s.readOnly:
		s.failing, s.readOnly = true, true
		s.checkDue.Store(true) // another server, or its role changed
		s.log.ErrorContext(ctx, "the database is read-only; nothing is published until this worker is connected to a server that takes writes",
			"error", fmt.Errorf("%w: %w", outbox.ErrReadOnly, err))
	case ctx.Err() == nil && !s.failing:
		s.failing = true
		s.log.WarnContext(ctx, "leases could not be renewed; publishing stops when they expire", "error", err)
	}
	return err
}

// step is one heartbeat: give back drained lanes, extend held leases, learn what was
// lost, and take or drain lanes according to the shares.
func (s *leaser) step(ctx context.Context) error {
	have, ok := s.holding(ctx)
	if !ok {
		return errHung
	}
	if err := s.expireFormer(ctx); err != nil {
		return err
	}
	if len(have.released) > 0 {
		if err := s.release(ctx, have.released); err != nil {
			return err // they expire
		}
	}
	renew := have.renew
	if s.tending.held() != 0 {
		renew = append(renew, upkeepLane)
	}
	me := identity{owner: s.owner, name: s.cfg.Name, ready: s.ready() && !have.hung, stopping: s.stopping}
	// Trust counts from before the renewal is sent: the database's clock grants at
	// least that much.
	trusted := s.trustFrom(time.Now())
	held, err := ask(ctx, s.worker, opHeartbeat, func(ctx context.Context) (map[int]renewal, error) {
		return s.leases.beat(ctx, me, renew, s.cfg.Lease)
	})
	if err != nil {
		return err
	}
	s.renewedAt.Store(time.Now().UnixNano())
	s.renewed(ctx, have, held, trusted)
	if err := s.releaseStray(ctx, have, held); err != nil {
		return err
	}
	if s.stopping {
		return nil
	}
	return s.balance(ctx, have)
}

// expireFormer ends, once, the leases of the former worker with this name, if the name is
// this worker's alone. Should that worker be alive, epochs fence it off.
func (s *leaser) expireFormer(ctx context.Context) error {
	if !s.cfg.UniqueName || s.formerExpired {
		return nil
	}
	err := do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error {
		return s.leases.expireFormer(ctx, identity{owner: s.owner, name: s.cfg.Name})
	})
	s.formerExpired = err == nil
	return err
}

// trustFrom leaves a tenth of the lease as a margin for clocks that run at different
// speeds.
func (s *leaser) trustFrom(sent time.Time) time.Time {
	return sent.Add(s.cfg.Lease - s.cfg.Lease/10)
}

// ready reports whether this worker can work: the tables are as expected, and the sink,
// if it can report it, reaches its broker.
func (s *leaser) ready() bool {
	if _, why := s.health.unfit(time.Now()); why != nil || s.unfit.Load() {
		return false
	}
	if r, ok := s.sink.(interface{ Ready() bool }); ok {
		return r.Ready()
	}
	return true
}

// holding asks the loop for its lanes, and drops the drained ones.
func (s *leaser) holding(ctx context.Context) (holding, bool) {
	have := holding{epochs: map[int]int64{}}
	unfitFor, _ := s.health.unfit(time.Now())
	have.unfit = unfitFor > s.cfg.Lease/4
	grace := s.cfg.Lease / 3
	ok := s.call(ctx, func(e *engine, now time.Time) {
		for _, l := range e.leaving {
			have.hung = have.hung || l.hung(now, grace)
		}
		for number, l := range e.lanes {
			switch {
			case l == nil:
				have.mayHold[number] = e.mayHold(number)
				continue
			case l.draining && e.idle(l):
				e.drop(number)
				have.released = append(have.released, number)
				continue
			case !l.draining:
				have.active = append(have.active, number)
			}
			have.epochs[number] = l.epoch
			switch {
			case l.hung(now, grace):
				have.hung = true
			case have.unfit && l.draining: // another worker is ready, and this one cannot let go
			default:
				have.renew = append(have.renew, number)
			}
		}
	})
	return have, ok
}

// renewed passes the database's answer on its lanes to the loop.
func (s *leaser) renewed(ctx context.Context, have holding, held map[int]renewal, trusted time.Time) {
	if _, mine := held[upkeepLane]; !mine {
		s.tending.hold(0)
	}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, epoch := range have.epochs {
			switch {
			case held[number].epoch != epoch:
				s.met.lost.Add(ctx, 1)
				s.log.WarnContext(ctx, "lane was taken by another worker", "lane", number, "epoch", epoch)
				e.drop(number)
			case held[number].renewed:
				e.trust(number, epoch, trusted)
			}
		}
	})
}

// releaseStray gives back leases that are this worker's in the database but unknown to
// the loop: the answer to taking or releasing them was lost.
func (s *leaser) releaseStray(ctx context.Context, have holding, held map[int]renewal) error {
	var stray []int
	for number := range held {
		_, worked := have.epochs[number]
		if !worked && (number != upkeepLane || s.tending.held() == 0) {
			stray = append(stray, number)
		}
	}
	if len(stray) == 0 {
		return nil
	}
	return s.release(ctx, stray)
}

func (s *leaser) release(ctx context.Context, lanes []int) error {
	return do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error { return s.leases.release(ctx, s.owner, lanes) })
}

// take leases lanes that are still free.
func (s *leaser) take(ctx context.Context, lanes []int, most int) (map[int]taken, error) {
	return ask(ctx, s.worker, opTake, func(ctx context.Context) (map[int]taken, error) {
		return s.leases.take(ctx, s.owner, lanes, most, s.cfg.Lease)
	})
}

// balance moves the worker towards a fair share.
func (s *leaser) balance(ctx context.Context, have holding) error {
	type census struct {
		leases []lease
		peers  []peer
	}
	all, err := ask(ctx, s.worker, opHeartbeat, func(ctx context.Context) (c census, err error) {
		c.leases, c.peers, err = s.leases.census(ctx)
		return c, err
	})
	if err != nil {
		return err
	}
	leases, peers := all.leases, all.peers
	if old, gone := s.unrenewed(leases, peers, time.Now()); len(old)+len(gone) > 0 {
		s.log.WarnContext(ctx, "the database's clock was set back, leases of workers that are gone end now", "leases", len(old), "workers", len(gone))
		return do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error { return s.leases.expire(ctx, old, gone) })
	}
	mayHold := func(lane int) bool {
		if lane == upkeepLane {
			return s.tending.mayHold(time.Now(), 2*s.cfg.Lease)
		}
		return have.mayHold[lane]
	}
	share := divide(s.owner, peers, leases, have.active, mayHold, s.cfg.Lease)
	if len(share.give) > 0 {
		s.call(ctx, func(e *engine, _ time.Time) {
			for _, number := range share.give {
				e.drain(number)
			}
		})
	}
	if share.leave {
		s.tending.hold(0) // its lease is released with the next heartbeat
	}
	if share.upkeep {
		if err := s.takeUpkeep(ctx); err != nil {
			return err
		}
	}
	if share.most <= 0 || len(share.take) == 0 {
		return nil
	}
	trusted := s.trustFrom(time.Now())
	taken, err := s.take(ctx, share.take, share.most)
	if err != nil {
		return err
	}
	from := map[string]int{}
	for _, l := range leases {
		if _, ok := taken[l.lane]; ok && l.owner != "" && l.owner != s.owner {
			from[l.owner]++
		}
	}
	for owner, lanes := range from {
		s.met.takeovers.Add(ctx, int64(lanes))
		s.log.WarnContext(ctx, "lanes taken over from a worker whose lease expired", "lanes", lanes, "from", owner)
	}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, t := range taken {
			e.hold(number, t, trusted)
		}
	})
	return nil
}

// unrenewed returns leases that have not expired, and workers that count as alive,
// although nobody has renewed them for longer than a lease lasts, by this worker's own
// clock: the database's clock was set back after their owner had died. A live owner
// renews them, and trusts them for no longer than that.
func (s *leaser) unrenewed(leases []lease, peers []peer, now time.Time) (old []lease, gone []peer) {
	for _, l := range leases {
		was := s.leasesSeen[l.lane]
		left := l.left
		l.left = 0
		switch {
		case was.value != l:
			s.leasesSeen[l.lane] = seen[lease]{l, now}
		case left >= 0 && l.owner != s.owner && now.Sub(was.since) > 2*s.cfg.Lease:
			old = append(old, l)
		}
	}
	for _, p := range peers {
		was := s.workersSeen[p.owner]
		switch {
		case was.value != p:
			s.workersSeen[p.owner] = seen[peer]{p, now}
		case p.owner != s.owner && now.Sub(was.since) > 2*s.cfg.Lease:
			gone = append(gone, p)
		}
	}
	maps.DeleteFunc(s.workersSeen, func(owner string, _ seen[peer]) bool {
		return !slices.ContainsFunc(peers, func(p peer) bool { return p.owner == owner })
	})
	return old, gone
}

func (s *leaser) takeUpkeep(ctx context.Context) error {
	taken, err := s.take(ctx, []int{upkeepLane}, 1)
	if err != nil {
		return err
	}
	if t, ok := taken[upkeepLane]; ok {
		s.tending.hold(t.epoch)
	}
	return nil
}
