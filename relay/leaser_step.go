package relay

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/relaystore"
)

// step gives back drained lanes, extends held leases, learns what was lost, and takes or
// drains lanes according to the shares. At rest, leases are extended every third time: if
// they expire, nothing is repeated.
func (s *leaser) step(ctx context.Context) error {
	have, ok := s.holding(ctx)
	if !ok {
		return errHung
	}
	if err := s.expireFormer(ctx); err != nil {
		return err
	}
	if len(have.released) > 0 {
		if err := s.release(ctx, have.released, have.unsure); err != nil {
			return err // they expire
		}
		s.log.InfoContext(ctx, "lanes given back", "lanes", slices.Sorted(maps.Keys(have.released)))
	}
	me := s.identity(have.hung)
	if !have.atRest || !s.last.stands(time.Now(), me, have.epochs, s.upkeepLease.held(), s.cfg.Lease) {
		if err := s.beat(ctx, me, have); err != nil {
			return err
		}
	}
	if s.stopping {
		return nil
	}
	return s.balance(ctx, have)
}

// beat extends the leases, and handles what was lost meanwhile.
func (s *leaser) beat(ctx context.Context, me relaystore.Identity, have holding) error {
	renew, upkeep := have.renew, s.upkeepLease.held()
	if upkeep != 0 {
		renew = append(renew, relaystore.UpkeepLane)
	}
	// Trust counts from before the renewal is sent: the database's clock grants at
	// least that much.
	sent := time.Now()
	s.last = heartbeat{}
	held, err := ask(ctx, s.worker, opHeartbeat, func(ctx context.Context) (map[int]relaystore.Renewal, error) {
		return s.leases.Beat(ctx, me, renew, s.cfg.Lease)
	})
	if err != nil {
		return err
	}
	s.renewedAt.Store(time.Now().UnixNano())
	s.renewed(ctx, have, held, s.trustFrom(sent))
	if err := s.releaseStray(ctx, have, held); err != nil {
		return err
	}
	s.last = heartbeat{sentAt: sent, as: me, epochs: have.epochs, upkeep: upkeep}
	return nil
}

// expireFormer ends, once, the leases of the former worker with this name, if the name is
// this worker's alone. Should that worker be alive, epochs fence it off.
func (s *leaser) expireFormer(ctx context.Context) error {
	if !s.cfg.UniqueName || s.formerExpired {
		return nil
	}
	err := do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error {
		return s.leases.ExpireFormer(ctx, relaystore.Identity{Owner: s.owner, Name: s.cfg.Name})
	})
	s.formerExpired = err == nil
	return err
}

// trustFrom leaves a tenth of the lease as a margin for clocks that run at different
// speeds.
func (s *leaser) trustFrom(sent time.Time) time.Time {
	return sent.Add(s.cfg.Lease - s.cfg.Lease/10)
}

// holding asks the loop for its lanes, and drops the drained ones.
func (s *leaser) holding(ctx context.Context) (holding, bool) {
	have := holding{epochs: map[int]int64{}, released: map[int]int64{}}
	unfitFor, _ := s.health.unfit(time.Now())
	have.unfit = unfitFor > s.cfg.Lease/4
	grace := s.cfg.Lease / 3
	ok := s.call(ctx, func(e *engine, now time.Time) {
		have.atRest, have.active = e.atRest(), e.active()
		for _, l := range e.leaving {
			have.hung = have.hung || l.hung(now, grace)
		}
		for number, l := range e.lanes {
			switch {
			case l == nil:
				have.mayHold[number] = e.mayHold(number)
				continue
			case l.draining && e.idle(l):
				if l.isUnsure() {
					have.unsure = append(have.unsure, number)
				}
				e.drop(number)
				have.released[number] = l.epoch
				continue
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
func (s *leaser) renewed(ctx context.Context, have holding, held map[int]relaystore.Renewal, trusted time.Time) {
	if held[relaystore.UpkeepLane].Epoch != s.upkeepLease.held() {
		s.upkeepLease.hold(0)
	}
	var lost []int
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, epoch := range have.epochs {
			switch {
			case held[number].Epoch != epoch:
				s.met.lost.Add(ctx, 1)
				lost = append(lost, number)
				e.drop(number)
			case held[number].Renewed:
				e.trust(number, epoch, trusted)
			}
		}
	})
	if len(lost) > 0 {
		slices.Sort(lost)
		s.log.WarnContext(ctx, "leases lost to another worker", "lanes", lost)
	}
}

// releaseStray gives back leases that are this worker's in the database but unknown to
// the loop: the answer to taking or releasing them was lost.
func (s *leaser) releaseStray(ctx context.Context, have holding, held map[int]relaystore.Renewal) error {
	stray := map[int]int64{}
	var unsure []int // what was known of them is lost
	for number, lease := range held {
		_, worked := have.epochs[number]
		switch {
		case worked:
		case number != relaystore.UpkeepLane:
			stray[number] = lease.Epoch
			unsure = append(unsure, number)
		case s.upkeepLease.held() == 0:
			stray[number] = lease.Epoch
		}
	}
	if len(stray) == 0 {
		return nil
	}
	return s.release(ctx, stray, unsure)
}

func (s *leaser) release(ctx context.Context, epochs map[int]int64, unsure []int) error {
	return do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error { return s.leases.Release(ctx, s.owner, epochs, unsure) })
}

// take leases lanes that are still free.
func (s *leaser) take(ctx context.Context, lanes []int, most int) (map[int]relaystore.Taken, error) {
	return ask(ctx, s.worker, opTake, func(ctx context.Context) (map[int]relaystore.Taken, error) {
		return s.leases.Take(ctx, s.owner, lanes, most, s.cfg.Lease)
	})
}

// balance moves the worker towards a fair share.
func (s *leaser) balance(ctx context.Context, have holding) error {
	type census struct {
		leases []relaystore.Lease
		peers  []relaystore.Worker
	}
	all, err := ask(ctx, s.worker, opHeartbeat, func(ctx context.Context) (c census, err error) {
		c.leases, c.peers, err = s.leases.Census(ctx)
		return c, err
	})
	if err != nil {
		return err
	}
	leases, peers := all.leases, all.peers
	if outdated(s.owner, peers, leases, have.epochs) {
		s.last = heartbeat{} // the next step learns what was lost
		return nil
	}
	if old, gone := s.unrenewed(leases, peers, time.Now()); len(old)+len(gone) > 0 {
		s.log.WarnContext(ctx, "the database's clock was set back, leases of workers that are gone end now", "leases", len(old), "workers", len(gone))
		return do(ctx, s.worker, opHeartbeat, func(ctx context.Context) error { return s.leases.Expire(ctx, old, gone) })
	}
	mayHold := func(lane int) bool {
		if lane == relaystore.UpkeepLane {
			return s.upkeepLease.mayHold(time.Now(), 2*s.cfg.Lease)
		}
		return have.mayHold[lane]
	}
	share := divide(s.owner, peers, leases, s.handovers.keepFirst(have.active), mayHold, s.handovers.all(), s.cfg.Lease)
	if len(share.give) > 0 {
		s.call(ctx, func(e *engine, _ time.Time) {
			for _, number := range share.give {
				e.drain(number)
			}
		})
	}
	if share.leave {
		s.upkeepLease.hold(0) // its lease is released with the next heartbeat
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
		if _, ok := taken[l.Lane]; ok && l.Owner != "" && l.Owner != s.owner {
			from[l.Owner]++
		}
	}
	for owner, lanes := range from {
		s.met.takeovers.Add(ctx, int64(lanes))
		s.log.WarnContext(ctx, "lanes taken over from a worker whose lease expired", "lanes", lanes, "from", owner[:min(ownerDigits, len(owner))])
	}
	s.call(ctx, func(e *engine, _ time.Time) {
		for number, t := range taken {
			e.hold(number, t, trusted)
		}
	})
	if len(taken) > 0 {
		s.log.InfoContext(ctx, "lanes taken", "lanes", slices.Sorted(maps.Keys(taken)))
	}
	return nil
}

// unrenewed returns leases that have not expired, and workers that count as alive,
// although nobody has renewed them for longer than a lease lasts, by this worker's own
// clock: the database's clock was set back after their owner had died. A live owner
// renews them, and trusts them for no longer than that.
func (s *leaser) unrenewed(leases []relaystore.Lease, peers []relaystore.Worker, now time.Time) (old []relaystore.Lease, gone []relaystore.Worker) {
	for _, l := range leases {
		was := s.leasesSeen[l.Lane]
		left := l.Left
		l.Left = 0
		switch {
		case was.value != l:
			s.leasesSeen[l.Lane] = seen[relaystore.Lease]{l, now}
		case left >= 0 && l.Owner != s.owner && now.Sub(was.since) > 2*s.cfg.Lease:
			old = append(old, l)
		}
	}
	for _, p := range peers {
		was := s.workersSeen[p.Owner]
		switch {
		case was.value != p:
			s.workersSeen[p.Owner] = seen[relaystore.Worker]{p, now}
		case p.Owner != s.owner && now.Sub(was.since) > 2*s.cfg.Lease:
			gone = append(gone, p)
		}
	}
	maps.DeleteFunc(s.workersSeen, func(owner string, _ seen[relaystore.Worker]) bool {
		return !slices.ContainsFunc(peers, func(p relaystore.Worker) bool { return p.Owner == owner })
	})
	return old, gone
}

func (s *leaser) takeUpkeep(ctx context.Context) error {
	taken, err := s.take(ctx, []int{relaystore.UpkeepLane}, 1)
	if err != nil {
		return err
	}
	if t, ok := taken[relaystore.UpkeepLane]; ok {
		s.upkeepLease.hold(t.Epoch)
	}
	return nil
}
