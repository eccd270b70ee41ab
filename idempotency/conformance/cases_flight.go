package conformance

import (
	"bytes"
	"context"
	"net/http"
	"sync"
	"time"
)

// flightCases returns the cases for what happens while a request runs.
func flightCases() []Case {
	return []Case{
		{Name: "copies that come at once run once", operation: true, test: func(x *session) {
			for range bursts {
				x.next()
				x.freeBurst()
			}
		}},
		{Name: "of copies that come at once while the first runs none starts", test: func(x *session) {
			for range bursts {
				x.next()
				x.heldBurst()
			}
		}},
		{Name: "a handler of seconds runs once, though copies come all along", test: func(x *session) {
			m := message{plan: once(Plan{Hold: true, Body: []byte("slow")})}
			wait := x.start(m)
			defer wait()
			x.awaitHeld()
			defer x.release()
			for end := time.Now().Add(min(2500*time.Millisecond, x.capabilities.Timeout*3/4)); time.Now().Before(end); {
				r := x.send(m)
				x.check(x.inProgress(r), "status %d: %s", r.status, r.body)
				x.wait(100 * time.Millisecond)
			}
			x.check(x.held() == 1, "%d handlers run", x.held())
			x.release()
			first := wait()
			x.check(first.err == nil && first.status == http.StatusCreated, "status %d: %s %v", first.status, first.body, first.err)
			x.expectReplay(first, x.settle(m))
			x.expectEffects(1, 1)
		}},
		{Name: "50 different keys at once all run", operation: true, test: func(x *session) {
			parallel(50, func(i int) {
				// A service under load may answer with a timeout first; sending the request
				// again then returns the success.
				r := x.settle(message{keys: []string{unique()}, fill: i, plan: once(Plan{IgnoreContext: true})})
				x.check(r.status < http.StatusBadRequest, "status %d: %s", r.status, r.body)
			})
			x.expectEffects(50, 50)
		}},
		{Name: "a copy in flight is answered as in progress", test: inFlight(func(x *session, _ int, m message) {
			m.url = 0
			for range len(x.target.URLs) {
				r := x.send(m)
				x.check(x.inProgress(r), "status %d: %s", r.status, r.body)
				x.expectProblem(r, http.StatusConflict, "in-progress")
				x.check(r.header.Get("Retry-After") != "", "no Retry-After")
			}
		})},
		{Name: "another process answers a copy in flight as in progress", two: true, test: inFlight(func(x *session, at int, m message) {
			m.url = at%len(x.target.URLs) + 1
			x.expectProblem(x.send(m), http.StatusConflict, "in-progress")
		})},
		{Name: "another body in flight is refused, not asked to wait", test: inFlight(func(x *session, _ int, m message) {
			m.body = []byte("another")
			x.expectProblem(x.send(m), http.StatusUnprocessableEntity, "key-reused")
		})},
		{Name: "a client that breaks off gets the answer on its retry", test: func(x *session) {
			ctx, cancel := context.WithCancel(x.ctx)
			m := message{plan: once(Plan{Hold: true, Body: []byte("done")})}
			broken := m
			broken.ctx = ctx
			wait := x.start(broken)
			x.awaitHeld()
			cancel()
			wait()
			// The service notices at some time that the client has gone.
			for end := time.Now().Add(min(time.Second, x.capabilities.Timeout/3)); time.Now().Before(end); x.wait(50 * time.Millisecond) {
				x.check(x.inProgress(x.send(m)), "the key was given up with the client")
			}
			x.check(x.held() == 1, "%d handlers run", x.held())
			x.release()
			r := x.settle(m)
			x.check(r.status == http.StatusCreated && string(r.body) == "done", "status %d: %s", r.status, r.body)
			x.expectEffects(1, 1)
		}},
		{Name: "a request whose client does not wait runs at most once", operation: true, test: func(x *session) {
			for range 3 {
				x.next()
				ctx, cancel := context.WithCancel(x.ctx)
				m := message{plan: once(Plan{Body: []byte("done")})}
				broken := m
				broken.ctx, broken.sent = ctx, cancel
				x.try(broken)
				cancel() // for a request that was not sent
				r := x.settle(m)
				x.skipIf(x.capabilities.FailuresUnknown && r.problem() == "outcome-unknown")
				x.check(r.status < http.StatusBadRequest, "status %d: %s", r.status, r.body)
				again := x.settle(m)
				x.check(again.status == r.status && bytes.Equal(again.body, r.body), "status %d: %s, then %d: %s", r.status, r.body, again.status, again.body)
				x.expectEffects(1, 1)
			}
		}},
	}
}

// start sends m, and returns a function that waits for the answer.
func (x *session) start(m message) (wait func() *reply) {
	var first *reply
	var sending sync.WaitGroup
	x.pending.Add(1)
	sending.Go(func() { first = x.tracked(m) })
	return func() *reply {
		sending.Wait()
		return first
	}
}

// inFlight runs test while a request is held in its handler. Then it releases the handler
// and checks that the request is replayed.
func inFlight(test func(x *session, at int, m message)) func(*session) {
	return func(x *session) {
		m := message{plan: once(Plan{Hold: true, Body: []byte("held")})}
		wait := x.start(m)
		defer wait()
		at := x.awaitHeld()
		defer x.release()
		test(x, at, m)
		x.release()
		first := wait()
		x.check(first.err == nil && first.status == http.StatusCreated, "status %d: %s %v", first.status, first.body, first.err)
		x.expectReplay(first, x.send(m))
		x.expectEffects(1, 1)
	}
}
