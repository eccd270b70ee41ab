package pgmodel

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
)

// Actor is who makes a call: a process, and what it works on.
type Actor struct {
	Process int
	Work    int
}

func (a Actor) compare(b Actor) int {
	return cmp.Or(cmp.Compare(a.Process, b.Process), cmp.Compare(a.Work, b.Work))
}

type actorKey struct{}

// WithActor returns a context whose calls are made by a.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

func actorOf(ctx context.Context) Actor {
	a, _ := ctx.Value(actorKey{}).(Actor)
	return a
}

// Call is a statement or a COMMIT that waits for the schedule.
type Call struct {
	Actor
	text   string
	tx     *Tx  // of a COMMIT
	on     *Tx  // for whose end it waits; nil: it can go on
	inside bool // of a transaction, or of a statement that has begun
	turn   chan fault
}

// fault is what happens to a call.
type fault int

const (
	none          fault = iota
	lostBefore          // the connection is lost, and the server has seen nothing
	lostAfter           // the server does it, and its answer is lost
	serialization       // the statement loses against another transaction
	lockTimeout         // of a call that waits for a lock
)

// wait waits until the schedule lets a call go on. ok is false if done was closed before.
func (s *Server) wait(c *Call, done <-chan struct{}) (f fault, ok bool) {
	c.turn = make(chan fault, 1)
	s.mu.Lock()
	if s.down || s.dead[c.Process] {
		s.mu.Unlock()
		return lostBefore, true
	}
	s.calls = append(s.calls, c)
	s.mu.Unlock()
	select {
	case f := <-c.turn:
		return f, true
	case <-done:
		s.mu.Lock()
		defer s.mu.Unlock()
		if !slices.Contains(s.calls, c) { // it has its turn at the same time
			return <-c.turn, true
		}
		s.remove(c)
		return none, false
	}
}

// remove takes a call from those that wait. Called with mu held.
func (s *Server) remove(c *Call) {
	s.calls = slices.DeleteFunc(s.calls, func(other *Call) bool { return other == c })
}

// Waiting returns how many calls wait for the schedule, and how many of them for a lock.
func (s *Server) Waiting() (all, locked int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.on != nil {
			locked++
		}
	}
	return len(s.calls), locked
}

// Open returns how many transactions have not ended.
func (s *Server) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// Next lets one call go on, or lets the server notice that a client is gone. It returns false
// if there is nothing to do. Without faults, calls succeed unless they wait for a lock.
func (s *Server) Next(rng *rand.Rand, faults bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ready, locked []*Call
	for _, c := range s.sorted() {
		if c.on == nil {
			ready = append(ready, c)
		} else {
			locked = append(locked, c)
		}
	}
	orphans := s.orphans()
	switch {
	case len(orphans) > 0 && (len(ready) == 0 || rng.IntN(8) == 0):
		s.end(orphans[rng.IntN(len(orphans))])
		s.counts["noticed"]++
	case len(locked) > 0 && rng.IntN(12) == 0:
		s.counts["lock timeouts"]++
		s.let(locked[rng.IntN(len(locked))], lockTimeout)
	case len(ready) > 0:
		c := ready[rng.IntN(len(ready))]
		s.let(c, s.draw(rng, c, faults))
	default:
		return false
	}
	return true
}

// let gives a call its turn. Called with mu held.
func (s *Server) let(c *Call, f fault) {
	s.remove(c)
	c.turn <- f
}

// draw chooses what happens to a call.
func (s *Server) draw(rng *rand.Rand, c *Call, faults bool) fault {
	if !faults || s.spared[c.text] {
		return none
	}
	odds := 30
	if c.tx != nil { // the worst moment
		odds = 6
	}
	if rng.IntN(odds) > 0 {
		return none
	}
	f := []fault{lostBefore, lostAfter, serialization}[rng.IntN(3)]
	if f == serialization && !c.inside {
		return none
	}
	s.counts[map[fault]string{lostBefore: "lost calls", lostAfter: "lost answers", serialization: "serialization failures"}[f]]++
	if f == lostAfter && c.tx != nil {
		s.counts["commits without an answer"]++
	}
	return f
}

// Crash ends a process. What it has sent is done or not. Its transactions stay open until the
// server notices.
func (s *Server) Crash(rng *rand.Rand, process int) {
	s.mu.Lock()
	s.dead[process] = true
	for tx := range s.open {
		tx.orphan = tx.orphan || tx.actor.Process == process
	}
	s.mu.Unlock()
	s.cut(rng, func(c *Call) bool { return c.Process == process }, func() {})
}

// Fail stops the server as a crash does: nothing answers until Restart.
func (s *Server) Fail(rng *rand.Rand) {
	s.mu.Lock()
	s.down = true
	s.counts["outages"]++
	s.mu.Unlock()
	s.cut(rng, func(*Call) bool { return true }, func() {
		for tx := range s.open {
			s.end(tx)
		}
	})
}

// Restart ends an outage.
func (s *Server) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = false
}

// Down reports whether there is an outage.
func (s *Server) Down() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.down
}

// cut takes the connections of calls away. A COMMIT that the server has got takes place, and so
// does one statement outside of transactions; then calls end, and what was cut is heard of.
func (s *Server) cut(rng *rand.Rand, which func(*Call) bool, end func()) {
	s.mu.Lock()
	var calls []*Call
	for _, c := range s.sorted() {
		if which(c) {
			calls = append(calls, c)
			s.remove(c)
		}
	}
	s.mu.Unlock()
	arrived := map[*Call]bool{}
	alone := false
	for _, c := range calls {
		if rng.IntN(2) > 0 {
			continue
		}
		if c.tx != nil {
			_ = s.commit(c.tx) // whatever comes of it, nobody hears it
		} else if !alone && !c.inside && c.on == nil {
			alone, arrived[c] = true, true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	end()
	for _, c := range calls {
		if arrived[c] {
			c.turn <- lostAfter
		} else {
			c.turn <- lostBefore
		}
	}
}

// sorted returns the calls in an order that the schedule repeats. Called with mu held.
func (s *Server) sorted() []*Call {
	return slices.SortedStableFunc(slices.Values(s.calls), func(a, b *Call) int { return cmp.Or(a.compare(b.Actor), cmp.Compare(a.text, b.text)) })
}
