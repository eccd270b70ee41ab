package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

// flightCases returns the cases for what happens while a request runs.
func flightCases() []Case {
	return []Case{
		{Name: "50 copies at once run once", plain: true, test: func(x *session) {
			const copies = 50
			m := message{plan: once(Plan{Body: []byte("once")})}
			replies := make([]*reply, copies)
			var sending sync.WaitGroup
			for i := range replies {
				sending.Go(func() { replies[i] = x.try(m) })
			}
			sending.Wait()
			final := x.settle(m)
			firsts := 0
			for _, r := range replies {
				x.check(r.err == nil, "no answer: %v", r.err)
				if r.inProgress() {
					continue
				}
				x.check(r.status == final.status && bytes.Equal(r.body, final.body), "status %d: %s", r.status, r.body)
				if r.header.Get("Idempotency-Replayed") == "" {
					firsts++
				}
			}
			if x.target.Plain == nil {
				x.check(firsts == 1, "%d answers are no replays", firsts)
			}
			x.expectEffects(1, 1)
		}},
		{Name: "of copies that come at once while the first runs none starts", test: func(x *session) {
			for range 8 {
				x.key, x.name = unique(), unique()
				x.burst()
			}
		}},
		{Name: "a handler of seconds runs once, though copies come all along", test: func(x *session) {
			m := message{plan: once(Plan{Hold: true, Body: []byte("slow")})}
			var first *reply
			var sending sync.WaitGroup
			sending.Go(func() { first = x.try(m) })
			defer sending.Wait()
			x.awaitHeld()
			defer x.release()
			for end := time.Now().Add(min(2500*time.Millisecond, x.capabilities.Timeout*3/4)); time.Now().Before(end); {
				r := x.send(m)
				x.check(r.inProgress(), "status %d: %s", r.status, r.body)
				x.wait(100 * time.Millisecond)
			}
			x.check(x.held() == 1, "%d handlers run", x.held())
			x.release()
			sending.Wait()
			x.check(first.err == nil && first.status == http.StatusCreated, "status %d: %s %v", first.status, first.body, first.err)
			x.expectReplay(first, x.settle(m))
			x.expectEffects(1, 1)
		}},
		{Name: "the status URL returns the state of a key", test: inFlight(func(x *session, _ int, m message) {
			var problem struct {
				URL string `json:"status_url"`
			}
			if r := x.send(m); json.Unmarshal(r.body, &problem) != nil || problem.URL == "" {
				panic(skipped("names no status URL"))
			}
			for _, state := range []string{"started", "completed"} {
				var status struct {
					State string `json:"state"`
				}
				if err := x.get(x.ctx, x.target.URLs[0]+problem.URL, &status); err != nil {
					x.fail("%v", err)
				}
				x.check(status.State == state, "state %q, want %q", status.State, state)
				x.release()
				x.settle(m)
			}
		})},
		{Name: "50 different keys at once all run", test: func(x *session) {
			var sending sync.WaitGroup
			replies := make([]*reply, 50)
			for i := range replies {
				// A service under load may answer with a timeout first; sending the request
				// again then returns the success.
				m := message{keys: []string{unique()}, plan: once(Plan{IgnoreContext: true})}
				sending.Go(func() { replies[i] = x.settle(m) })
			}
			sending.Wait()
			for _, r := range replies {
				x.check(r.err == nil && r.status == http.StatusCreated, "status %d: %s %v", r.status, r.body, r.err)
			}
			x.expectEffects(50, 50)
		}},
		{Name: "a copy in flight is answered as in progress", test: inFlight(func(x *session, _ int, m message) {
			m.url = 0
			for range len(x.target.URLs) {
				r := x.send(m)
				x.check(r.inProgress(), "status %d: %s", r.status, r.body)
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
			var sending sync.WaitGroup
			sending.Go(func() { x.try(broken) })
			x.awaitHeld()
			cancel()
			sending.Wait()
			x.check(x.send(m).inProgress(), "the key was given up with the client")
			x.release()
			r := x.settle(m)
			x.check(r.status == http.StatusCreated && string(r.body) == "done", "status %d: %s", r.status, r.body)
			x.expectEffects(1, 1)
		}},
	}
}

// inFlight runs test while a request is held in its handler. Then it releases the handler
// and checks that the request is replayed.
func inFlight(test func(x *session, at int, m message)) func(*session) {
	return func(x *session) {
		m := message{plan: once(Plan{Hold: true, Body: []byte("held")})}
		var first *reply
		var sending sync.WaitGroup
		sending.Go(func() { first = x.try(m) })
		defer sending.Wait()
		at := x.awaitHeld()
		defer x.release()
		test(x, at, m)
		x.release()
		sending.Wait()
		x.check(first.err == nil && first.status == http.StatusCreated, "status %d: %s %v", first.status, first.body, first.err)
		x.expectReplay(first, x.send(m))
		x.expectEffects(1, 1)
	}
}

// burst sends 20 copies at once to a handler that is held until they are answered.
func (x *session) burst() {
	const copies = 20
	m := message{plan: once(Plan{Hold: true})}
	replies := make(chan *reply, copies)
	var sending sync.WaitGroup
	for range copies {
		sending.Go(func() { replies <- x.try(m) })
	}
	defer sending.Wait()
	x.awaitHeld()
	defer x.release()
	for n := range copies - 1 { // all but the first
		select {
		case r := <-replies:
			if r.problem() == "execution-timeout" {
				x.check(x.held() == 1, "%d handlers run", x.held())
				panic(skipped("the first ran out of time before the others were answered: the machine is busy"))
			}
			x.check(r.inProgress(), "status %d: %s %v", r.status, r.body, r.err)
		case <-x.ctx.Done():
			x.fail("only %d copies are answered while the first runs", n)
		}
	}
	x.check(x.held() == 1, "%d handlers run", x.held())
	x.release()
	sending.Wait()
	x.expectEffects(1, 1)
}
