package conformance

import (
	"context"
	"net/http"
	"sync"
)

// Process controls a process of the service, for cases in which it is killed or stopped.
// Each method returns when that has happened.
type Process interface {
	Kill(ctx context.Context) error   // as kill -9 does
	Start(ctx context.Context) error  // after Kill: it serves again at its URL
	Freeze(ctx context.Context) error // as SIGSTOP does
	Thaw(ctx context.Context) error   // as SIGCONT does
}

// processCases returns the cases for the requests of a process that is killed or stopped. That
// is the last process; the first one gets the requests meanwhile.
func processCases() []Case {
	return []Case{
		{Name: "an answer is replayed though its process dies behind it", control: true, test: func(x *session) {
			first := x.send(message{url: x.last(), plan: once(Plan{Body: []byte("given")})})
			x.control("kill", Process.Kill)
			defer x.control("start", Process.Start)
			x.expectReplay(first, x.settle(message{url: 1}))
			x.expectEffects(1, 1)
		}},
		{Name: "a process that is killed in a handler leaves no effect, or an unknown outcome", control: true, test: func(x *session) {
			x.shortTimeout()
			var sending sync.WaitGroup
			defer sending.Wait()
			sending.Go(func() { x.try(message{url: x.last(), plan: once(Plan{Hold: true})}) })
			x.awaitHeld()
			x.control("kill", Process.Kill)
			r := func() *reply {
				defer x.control("start", Process.Start)
				return x.succeed()
			}()
			again := x.settle(message{url: x.last(), plan: once(Plan{})})
			x.check(again.status == r.status, "status %d, then %d: %s", r.status, again.status, again.body)
			if x.capabilities.Transactional || r.status != http.StatusCreated {
				x.expectEffects(1, 1)
			}
		}},
		{Name: "a process that is paused beyond its lease and resumes has no effect beside its successor's", control: true, test: func(x *session) {
			x.shortTimeout()
			if x.capabilities.Transactional && x.capabilities.OneWriter {
				panic(skipped("a paused process keeps all others from writing"))
			}
			var late *reply
			var sending sync.WaitGroup
			defer sending.Wait()
			sending.Go(func() {
				late = x.try(message{url: x.last(), plan: once(Plan{Hold: true, IgnoreContext: true, Body: []byte("late")})})
			})
			x.awaitHeld()
			x.control("freeze", Process.Freeze)
			r := func() *reply {
				defer x.control("thaw", Process.Thaw)
				return x.succeed()
			}()
			x.release()
			sending.Wait()
			x.check(late.err == nil, "no answer: %v", late.err)
			if !x.capabilities.Transactional && r.status == http.StatusCreated {
				return // it is taken over although it may have had its effect: Config.Failures.Crashed allows it
			}
			want := "successor"
			if !x.capabilities.Transactional {
				want = "late" // it was not run again, and it knows its outcome
			}
			x.check(late.status == http.StatusServiceUnavailable || string(late.body) == want, "it answers with %d: %s", late.status, late.body)
			again := x.settle(message{plan: once(Plan{})})
			for again.problem() == "outcome-unknown" { // until then
				x.pause()
				again = x.settle(message{plan: once(Plan{})})
			}
			x.check(again.status == http.StatusCreated && string(again.body) == want, "status %d: %s", again.status, again.body)
			x.expectEffects(1, 1)
		}},
	}
}

// last is the number of the URL whose process is killed or stopped.
func (x *session) last() int { return len(x.target.URLs) }

func (x *session) control(what string, do func(Process, context.Context) error) {
	if err := do(x.target.Processes[x.last()-1], x.ctx); err != nil {
		x.fail("%s the process: %v", what, err)
	}
}

// succeed sends to the first process until the lease has ended.
func (x *session) succeed() *reply {
	r := x.settle(message{url: 1, plan: once(Plan{Body: []byte("successor")})})
	if !x.capabilities.Transactional && r.problem() == "outcome-unknown" {
		return r
	}
	x.check(!x.capabilities.FailuresUnknown, "it runs again, though it may have had its effect: status %d: %s", r.status, r.body)
	x.check(r.status == http.StatusCreated && string(r.body) == "successor", "status %d: %s", r.status, r.body)
	return r
}
