package conformance

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// gate lets requests pass together: each has reached the service, which has asked for its
// body (Expect: 100-continue), before any of them sends it. Without that, the first of them
// is often claimed before the next one arrives, and a service that checks first and claims
// later passes by luck.
type gate struct {
	missing atomic.Int64
	open    chan struct{}
	once    sync.Once
}

func newGate(copies int) *gate {
	g := &gate{open: make(chan struct{})}
	g.missing.Store(int64(copies))
	return g
}

// gateLimit opens a gate for services that do not ask all requests for their bodies.
const gateLimit = time.Second

func (g *gate) pass(ctx context.Context) {
	if g.missing.Add(-1) == 0 {
		g.once.Do(func() { close(g.open) })
	}
	limit := time.NewTimer(gateLimit)
	defer limit.Stop()
	select {
	case <-g.open:
	case <-limit.C:
		g.once.Do(func() { close(g.open) })
	case <-ctx.Done():
	}
}

// copies is how many requests a burst has.
const copies = 20

// burst sends copies of m at once. Their replies come in any order; wait returns when all
// are there.
func (x *session) burst(m message) (replies <-chan *reply, wait func()) {
	m.gate, m.expect = newGate(copies), true
	out := make(chan *reply, copies)
	var sending sync.WaitGroup
	x.pending.Add(copies)
	for range copies {
		sending.Go(func() {
			r := x.tracked(m)
			if r.status == http.StatusExpectationFailed {
				plain := m
				plain.gate, plain.expect = nil, false
				r = x.try(plain)
			}
			out <- r
		})
	}
	return out, sending.Wait
}

// parallel calls do with 0 to n-1 at the same time. If a call fails the case, parallel does
// once all have ended.
func parallel(n int, do func(i int)) {
	var calls sync.WaitGroup
	failed := make(chan any, n)
	for i := range n {
		calls.Go(func() {
			defer func() {
				if v := recover(); v != nil {
					failed <- v
				}
			}()
			do(i)
		})
	}
	calls.Wait()
	select {
	case v := <-failed:
		panic(v)
	default:
	}
}

// bursts is how many bursts a case sends.
const bursts = 10

// next gives the session another key, and other effects to count.
func (x *session) next() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.key, x.name, x.used = unique(), unique(), map[int]bool{}
}

// freeBurst sends a burst and checks that it ran once.
func (x *session) freeBurst() {
	m := message{plan: once(Plan{Body: []byte("once")})}
	replies, wait := x.burst(m)
	wait()
	final := x.settle(m)
	firsts, timedOut, unknown := 0, false, final.problem() == "outcome-unknown"
	var answered []*reply
	for range copies {
		r := <-replies
		x.check(r.err == nil, "no answer: %v", r.err)
		timedOut = timedOut || r.status == http.StatusServiceUnavailable
		unknown = unknown || r.problem() == "outcome-unknown"
		if x.later(r) {
			continue
		}
		answered = append(answered, r)
		if !x.marked(r) {
			firsts++
		}
	}
	x.skipIf(timedOut && unknown)
	x.check(final.status < http.StatusBadRequest, "status %d: %s", final.status, final.body)
	for _, r := range answered {
		x.check(r.status == final.status && string(r.body) == string(final.body), "one copy is answered with status %d: %s, another with %d: %s",
			r.status, r.body, final.status, final.body)
	}
	// A service that is too busy for an answer has at most one first answer less.
	if x.marked(final) {
		x.check(firsts <= 1, "%d answers are not marked as replays", firsts)
	}
	x.expectEffects(1, 1)
}

// heldBurst sends a burst to a handler that is held until all other copies are answered.
func (x *session) heldBurst() {
	m := message{plan: once(Plan{Hold: true})}
	replies, wait := x.burst(m)
	defer wait()
	x.awaitHeld()
	defer x.release()
	for n := range copies - 1 { // all but the first
		select {
		case r := <-replies:
			if r.problem() == "execution-timeout" {
				x.check(x.held() == 1, "%d handlers run", x.held())
				panic(skipped("the first ran out of time before the others were answered: the machine is busy"))
			}
			x.check(x.inProgress(r), "status %d: %s %v", r.status, r.body, r.err)
		case <-x.ctx.Done():
			x.fail("only %d copies are answered while the first runs", n)
		}
	}
	x.check(x.held() == 1, "%d handlers run", x.held())
	x.release()
	wait()
	x.expectEffects(1, 1)
}
