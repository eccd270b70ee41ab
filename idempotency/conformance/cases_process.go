package conformance

import (
	"net/http"
	"sync"
)

// processCases returns the cases for the requests of a process that is killed or stopped. That
// is the last process; the first one gets the requests meanwhile.
func processCases() []Case {
	return []Case{
		{Name: "an answer is replayed though its process dies behind it", operation: true, kill: true, test: func(x *session) {
			first := x.run(message{url: x.last(), plan: once(Plan{Body: []byte("given")})})
			x.killed(func() {
				x.expectReplay(first, x.settle(message{url: 1, plan: once(Plan{})}))
			})
			x.expectEffects(1, 1)
		}},
		{Name: "a process that is killed in a handler leaves no effect, or an unknown outcome", kill: true, test: func(x *session) {
			x.shortTimeout()
			wait := x.start(message{url: x.last(), ctx: x.ctx, plan: once(Plan{Hold: true})})
			defer wait()
			x.awaitHeld()
			var r *reply
			x.killed(func() { r = x.succeed() })
			again := x.settle(message{url: x.last(), plan: once(Plan{})})
			x.check(again.status == r.status, "status %d, then %d: %s", r.status, again.status, again.body)
			if x.capabilities.Transactional || r.status != http.StatusCreated {
				x.expectEffects(1, 1)
			}
		}},
		{Name: "a request whose process is killed has one effect and one answer, or an unknown outcome", operation: true, kill: true, test: func(x *session) {
			for range 3 { // the process dies at slightly different moments
				x.next()
				wait := x.sent()
				x.killed(func() {
					wait()
					x.oneAnswer(nil)
				})
				x.atMostOnce()
			}
		}},
		{Name: "a request whose process is paused beyond its lease has one effect and one answer, or an unknown outcome", operation: true, freeze: true, test: func(x *session) {
			x.skipBesideOneWriter(x.capabilities.OneWriter) // it may be paused in any write
			for range 3 {
				x.next()
				wait := x.sent()
				x.hook("Freeze", x.target.Hooks.Freeze)
				r := func() *reply {
					defer wait()
					defer x.hook("Thaw", x.target.Hooks.Thaw)
					return x.settle(message{}.planned("done").at(1))
				}()
				late := wait()
				if r.status < http.StatusBadRequest && late.err == nil && late.status < http.StatusBadRequest {
					x.check(string(late.body) == string(r.body), "its process answers with %s, another with %s", late.body, r.body)
				}
				x.oneAnswer(r)
				x.atMostOnce()
			}
		}},
		{Name: "a process that is paused beyond its lease and resumes has no effect beside its successor's", freeze: true, test: func(x *session) {
			x.shortTimeout()
			x.skipBesideOneWriter(x.capabilities.OneWriter && x.capabilities.Transactional)
			wait := x.start(message{url: x.last(), ctx: x.ctx, plan: once(Plan{Hold: true, IgnoreContext: true, Body: []byte("late")})})
			defer wait()
			x.awaitHeld()
			x.hook("Freeze", x.target.Hooks.Freeze)
			r := func() *reply {
				defer x.hook("Thaw", x.target.Hooks.Thaw)
				return x.succeed()
			}()
			x.release()
			late := wait()
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

// skipBesideOneWriter skips the case where a paused process may keep all others from writing.
func (x *session) skipBesideOneWriter(may bool) {
	if may {
		panic(skipped("a paused process keeps all others from writing"))
	}
}

// at is m, sent to the URL of this number.
func (m message) at(url int) message {
	m.url = url
	return m
}

// sent sends a request to the last process, and returns when the process may have it.
func (x *session) sent() (wait func() *reply) {
	sent := make(chan struct{})
	m := message{ctx: x.ctx}.planned("done").at(x.last())
	m.sent = sync.OnceFunc(func() { close(sent) })
	wait = x.start(m)
	select {
	case <-sent:
	case <-x.ctx.Done():
	}
	return wait
}

// oneAnswer checks that the request of sent has an answer, which stays the same, or an
// unknown outcome. An answer that another copy got must be this one; it may be nil.
func (x *session) oneAnswer(r *reply) {
	m := message{}.planned("done").at(1)
	if r == nil {
		r = x.settle(m)
	}
	if r.problem() == "outcome-unknown" {
		return
	}
	x.check(r.status < http.StatusBadRequest, "status %d: %s", r.status, r.body)
	again := x.settle(m)
	x.check(again.status == r.status && string(again.body) == string(r.body), "status %d: %s, then %d: %s", r.status, r.body, again.status, again.body)
}

// atMostOnce checks that there is no second effect.
func (x *session) atMostOnce() {
	if x.target.Operation == nil && !x.capabilities.Transactional {
		return // Config.Failures.Crashed may allow it
	}
	n, known := x.effects()
	x.check(!known || n <= 1, "%d effects", n)
}

// succeed sends to the first process until the lease has ended: the successor's answer.
func (x *session) succeed() *reply {
	r := x.settle(message{url: 1, plan: once(Plan{Body: []byte("successor")})})
	if !x.capabilities.Transactional && r.problem() == "outcome-unknown" {
		return r
	}
	x.check(!x.capabilities.FailuresUnknown, "it runs again, though it may have had its effect: status %d: %s", r.status, r.body)
	x.check(r.status == http.StatusCreated && string(r.body) == "successor", "status %d: %s", r.status, r.body)
	return r
}
