// Package group lets what is to be done at the same time be done together, in one
// transaction, and share the cost of its commit.
package group

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Group gathers members. The goroutine of one of them, the leader, does the work for
// all that it takes along.
type Group[W, R any] struct {
	limits Limits
	work   Work[W, R]

	mu      sync.Mutex
	pending []*Member[W, R] // the oldest first
	leaders int
	pace    pace
	filled  chan struct{} // capacity 1: holds a token when pending may have become enough
}

// New returns a group that does work. It holds no goroutine.
func New[W, R any](limits Limits, work Work[W, R]) *Group[W, R] {
	if limits.Writers == 0 {
		limits.Writers = single
	}
	return &Group[W, R]{limits: limits, work: work, pace: newPace(limits.Size, limits.Writers), filled: make(chan struct{}, 1)}
}

// Do has m done, in a group or alone. It reports false if ctx has ended before
// anybody was at work on m.
func (g *Group[W, R]) Do(ctx context.Context, m *Member[W, R]) (r R, done bool) {
	m.ctx, m.verdict = ctx, make(chan verdict[R], mostFailed+2)
	if !g.join(m) {
		r, result := g.work.Alone(ctx, m.Work)
		g.learn(result)
		return r, true
	}
	ended := ctx.Done()
	enough := time.NewTimer(cmp.Or(g.limits.MaxWait, forEver))
	defer enough.Stop()
	for {
		select {
		case v := <-m.verdict:
			switch v.do {
			case lead:
				g.lead(m)
			case runAlone:
				r, _ = g.work.Alone(ctx, m.Work)
				return r, true
			case finish:
				return v.result, true
			}
		case <-ended:
			if g.leave(m) {
				return r, false
			}
			ended = nil // somebody is at work on it
		case <-enough.C:
			if g.leave(m) {
				r, _ = g.work.Alone(ctx, m.Work)
				return r, true
			}
			enough.Reset(g.limits.MaxWait) // it may come back
		}
	}
}

const forEver = math.MaxInt64

// join makes m wait for a group, unless members are handled alone now.
func (g *Group[W, R]) join(m *Member[W, R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pace.size == 1 {
		return false
	}
	at := len(g.pending)
	for at > 0 && m.Since.Before(g.pending[at-1].Since) {
		at--
	}
	g.pending = slices.Insert(g.pending, at, m)
	if len(g.pending) >= g.pace.size {
		g.poke()
	}
	g.appoint()
	return true
}

// leave reports whether m was still waiting.
func (g *Group[W, R]) leave(m *Member[W, R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.pending, m)
	if i < 0 {
		return false
	}
	g.pending = slices.Delete(g.pending, i, i+1)
	// All that can be there is that it shall lead, and it will not.
	for {
		select {
		case <-m.verdict:
			g.leaders--
		default:
			g.appoint()
			return true
		}
	}
}

// bury forgets a member whose goroutine has ended: nobody hears what it is told.
func (g *Group[W, R]) bury(m *Member[W, R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.failed = mostFailed // a group that has it along does not give it back
	if i := slices.Index(g.pending, m); i >= 0 {
		g.pending = slices.Delete(g.pending, i, i+1)
	}
	for {
		select {
		case v := <-m.verdict:
			if v.do == lead {
				g.leaders--
			}
		default:
			return
		}
	}
}

// appoint tells waiting members to lead, as many as may at once. The first takes
// what there is; beside it only full groups are handled, so that the others gather
// meanwhile instead of going in many small ones. Called with mu held.
func (g *Group[W, R]) appoint() {
	led := 0 // of the waiting, by those that will lead
	for _, m := range g.pending {
		if m.leader {
			led += g.pace.size
		}
	}
	for _, m := range g.pending {
		full := len(g.pending)-led >= g.pace.size
		if g.leaders >= g.pace.leaders() || g.leaders > 0 && !full {
			return
		}
		if !m.leader {
			m.leader = true
			g.leaders++
			led += g.pace.size
			m.verdict <- verdict[R]{do: lead}
		}
	}
}

func (g *Group[W, R]) poke() {
	select {
	case g.filled <- struct{}{}:
	default:
	}
}

// learn takes into account how a member fared that was handled alone because
// groups are of one.
func (g *Group[W, R]) learn(result Result) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch result {
	case Clean:
		g.pace.clean(1)
	case InTheWay:
		g.pace.conflict(1)
	case Failed:
	}
}

// lead handles one group, by the goroutine of m.
func (g *Group[W, R]) lead(m *Member[W, R]) {
	left := g.take(m)
	ended := false
	// Also when a handler ends this goroutine.
	defer func() {
		for _, m := range left {
			m.Alone()
		}
		if !ended {
			g.bury(m)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.leaders--
		g.appoint()
	}()
	for round := 0; len(left) > 0 && round < mostRounds; round++ {
		left = g.handle(left)
	}
	ended = true
}

// mostRounds is how often a group is tried, each time without one that failed.
const mostRounds = 4

// take removes a group's members from those that wait. Its leader may be left behind,
// if enough have come that are older; then it can be told again.
func (g *Group[W, R]) take(leader *Member[W, R]) []*Member[W, R] {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.limits.Wait > 0 {
		g.await(g.limits.Wait)
	}
	leader.leader = false
	var batch []*Member[W, R]
	bytes, keys, ids := 0, map[string]bool{}, map[string]bool{}
	rest := g.pending[:0]
	for _, m := range g.pending {
		full := len(batch) >= g.pace.size || len(batch) > 0 && bytes+m.Bytes > g.limits.Bytes
		if full || ids[m.ID] || m.Key != "" && keys[m.Key] {
			rest = append(rest, m)
			continue
		}
		bytes += m.Bytes
		ids[m.ID], keys[m.Key] = true, true
		batch = append(batch, m)
	}
	clear(g.pending[len(rest):])
	g.pending = rest
	g.poke() // another leader may be waiting for what is gone
	// Groups that lock in the same order do not deadlock. If what a handler
	// writes goes by its key, this is such an order.
	slices.SortFunc(batch, func(a, b *Member[W, R]) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.ID, b.ID))
	})
	return batch
}

// await returns when enough are waiting for a group, or after some time. Called
// with mu held.
func (g *Group[W, R]) await(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for len(g.pending) > 0 && len(g.pending) < g.pace.size {
		g.mu.Unlock()
		over := false
		select {
		case <-g.filled:
		case <-timer.C:
			over = true
		}
		g.mu.Lock()
		if over {
			return
		}
	}
}

// handle tries a group once. It returns those to be tried again.
func (g *Group[W, R]) handle(members []*Member[W, R]) (again []*Member[W, R]) {
	ctx, done := together(members)
	defer done()
	again, result := g.work.Together(ctx, members)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch result {
	case Clean:
		g.pace.clean(len(members))
	case InTheWay:
		g.pace.conflict(len(members))
		g.split(again)
		return nil
	case Failed:
	}
	return again
}

// split lets members that were in each other's way, or in that of others, try again.
// Called with mu held.
func (g *Group[W, R]) split(members []*Member[W, R]) {
	var again []*Member[W, R]
	for _, m := range members {
		if m.failed++; m.failed >= mostFailed || g.pace.size == 1 {
			m.Alone()
			continue
		}
		m.leader = false
		again = append(again, m)
	}
	g.pending = append(again, g.pending...)
	slices.SortStableFunc(g.pending, func(a, b *Member[W, R]) int { return a.Since.Compare(b.Since) })
}

// together returns a context for what is done for all members: it has the values
// of the first one's, and ends when those of all have ended.
func together[W, R any](members []*Member[W, R]) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(members[0].ctx))
	var left atomic.Int64
	left.Store(int64(len(members)))
	stops := make([]func() bool, len(members))
	for i, m := range members {
		stops[i] = context.AfterFunc(m.ctx, func() {
			if left.Add(-1) == 0 {
				cancel()
			}
		})
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}
