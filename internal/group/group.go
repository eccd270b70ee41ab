// Package group batches concurrent work into one transaction, so that the members of
// a group share the cost of its commit.
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

// Group collects members into groups. The goroutine of one member, the leader, does the
// work for its whole group.
type Group[W, R any] struct {
	limits Limits
	work   Work[W, R]

	mu      sync.Mutex
	pending []*Member[W, R] // the oldest first
	leaders int
	pace    pace
	filled  chan struct{} // capacity 1: holds a token when pending may have become enough
}

// New returns a Group for work. It starts no goroutine.
func New[W, R any](limits Limits, work Work[W, R]) *Group[W, R] {
	if limits.Writers == 0 {
		limits.Writers = single
	}
	return &Group[W, R]{limits: limits, work: work, pace: newPace(limits.Size, limits.Writers), filled: make(chan struct{}, 1)}
}

// Do runs m, in a group or alone. It returns false if ctx ended before the work on m
// began.
func (g *Group[W, R]) Do(ctx context.Context, m *Member[W, R]) (r R, done bool) {
	m.ctx, m.instruction = ctx, make(chan instruction[R], mostFailed+2)
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
		case v := <-m.instruction:
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
			ended = nil // a leader is working on it
		case <-enough.C:
			if g.leave(m) {
				r, _ = g.work.Alone(ctx, m.Work)
				return r, true
			}
			enough.Reset(g.limits.MaxWait) // the group may return m to the waiting members
		}
	}
}

const forEver = math.MaxInt64

// join adds m to the waiting members. It returns false while members run alone.
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
		g.wake()
	}
	g.promote()
	return true
}

// leave removes m from the waiting members. It returns false if m no longer waits.
func (g *Group[W, R]) leave(m *Member[W, R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.pending, m)
	if i < 0 {
		return false
	}
	g.pending = slices.Delete(g.pending, i, i+1)
	// The only possible instruction is lead, and m will not lead.
	for {
		select {
		case <-m.instruction:
			g.leaders--
		default:
			g.promote()
			return true
		}
	}
}

// abandon removes a member whose goroutine has ended and no longer reads its instruction.
func (g *Group[W, R]) abandon(m *Member[W, R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.failed = mostFailed // a group that contains it does not return it
	if i := slices.Index(g.pending, m); i >= 0 {
		g.pending = slices.Delete(g.pending, i, i+1)
	}
	for {
		select {
		case v := <-m.instruction:
			if v.do == lead {
				g.leaders--
			}
		default:
			return
		}
	}
}

// promote makes waiting members leaders, up to the number of groups that may run at
// once. The first group takes what waits; further ones start only when they are full, so
// that members collect instead of running in many small groups. Called with mu held.
func (g *Group[W, R]) promote() {
	led := 0 // waiting members that the leaders will take
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
			m.instruction <- instruction[R]{do: lead}
		}
	}
}

func (g *Group[W, R]) wake() {
	select {
	case g.filled <- struct{}{}:
	default:
	}
}

// learn records the result of a member that ran alone because the group size is one.
func (g *Group[W, R]) learn(result Result) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch result {
	case Clean:
		g.pace.clean(1)
	case Contended:
		g.pace.conflict(1)
	case Failed:
	}
}

// lead runs one group in the goroutine of m.
func (g *Group[W, R]) lead(m *Member[W, R]) {
	left := g.take(m)
	ended := false
	// A handler may end this goroutine with runtime.Goexit or a panic.
	defer func() {
		for _, m := range left {
			m.Alone()
		}
		if !ended {
			g.abandon(m)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.leaders--
		g.promote()
	}()
	for round := 0; len(left) > 0 && round < mostRounds; round++ {
		left = g.handle(left)
	}
	ended = true
}

// mostRounds is how often a group is tried, each time without the members that failed.
const mostRounds = 4

// take removes the members of a group from the waiting ones. If enough older members
// wait, the leader is not part of its group and can be promoted again.
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
	g.wake() // another leader may wait for members that are gone
	// Groups that lock rows in the same order do not deadlock. This is that order if
	// handlers write the rows of their keys.
	slices.SortFunc(batch, func(a, b *Member[W, R]) int {
		return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.ID, b.ID))
	})
	return batch
}

// await returns when a full group waits, or after limit. Called with mu held.
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

// handle runs a group once. It returns the members to try again.
func (g *Group[W, R]) handle(members []*Member[W, R]) (again []*Member[W, R]) {
	ctx, done := together(members)
	defer done()
	again, result := g.work.Together(ctx, members)
	g.mu.Lock()
	defer g.mu.Unlock()
	switch result {
	case Clean:
		g.pace.clean(len(members))
	case Contended:
		g.pace.conflict(len(members))
		g.split(again)
		return nil
	case Failed:
	}
	return again
}

// split returns members of a contended group to the waiting ones, for smaller groups.
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

// together returns a context for the work of all members. It has the values of the
// first member's context, and ends when the contexts of all members have ended.
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
