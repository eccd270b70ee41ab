package conformance

import (
	"net/http"
	"time"
)

func failureCases() []Case {
	return []Case{
		{Name: "a panic leaves nothing, or an unknown outcome", test: func(x *session) {
			r := x.try(message{plan: once(Plan{Panic: true})})
			x.check(r.err != nil || r.status == http.StatusInternalServerError, "status %d: %s", r.status, r.body)
			if x.capabilities.FailuresUnknown {
				x.expectUnknown()
				return
			}
			again := x.settle(message{plan: once(Plan{})})
			x.check(again.status == http.StatusCreated, "status %d: %s", again.status, again.body)
			if x.capabilities.Transactional {
				x.expectEffects(1, 1)
			}
		}},
		{Name: "a handler over its time is answered, keeps its key while it runs, and leaves no effect", tx: true, test: func(x *session) {
			x.shortTimeout()
			m := message{plan: once(Plan{Hold: true, IgnoreContext: true})}
			x.expectProblem(x.send(m), http.StatusServiceUnavailable, "execution-timeout")
			again := x.send(m)
			for tries := 0; again.status == http.StatusServiceUnavailable && tries < 4; tries++ {
				again = x.send(m) // a busy service may have no time left for the copy itself
			}
			x.expectProblem(again, http.StatusConflict, "in-progress")
			x.release()
			r := x.settle(message{plan: once(Plan{Body: []byte("second try")})})
			x.check(r.status == http.StatusCreated && string(r.body) == "second try", "status %d: %s", r.status, r.body)
			x.expectEffects(1, 1)
		}},
		{Name: "a failure that declares to have had no effect may run again", test: func(x *session) {
			r := x.send(message{plan: Plan{NoEffect: true, Status: http.StatusBadGateway}})
			x.check(r.status == http.StatusBadGateway, "status %d: %s", r.status, r.body)
			r = x.settle(message{plan: once(Plan{})})
			x.check(r.status == http.StatusCreated, "status %d: %s", r.status, r.body)
			x.expectEffects(1, 1)
		}},
		{Name: "a success after the timeout is kept, or leaves no effect", test: func(x *session) {
			x.shortTimeout()
			m := message{plan: once(Plan{Hold: true, IgnoreContext: true, Body: []byte("late")})}
			x.expectProblem(x.send(m), http.StatusServiceUnavailable, "execution-timeout")
			x.release()
			again := x.settle(message{plan: once(Plan{Body: []byte("second try")})})
			want := "late"
			if x.capabilities.Transactional {
				want = "second try"
			}
			x.check(again.status == http.StatusCreated && string(again.body) == want, "status %d: %s", again.status, again.body)
			x.expectEffects(1, 1)
		}},
		{Name: "a handler that ends with its deadline is answered with 503, and leaves nothing or an unknown outcome", test: func(x *session) {
			x.shortTimeout()
			r := x.send(message{plan: once(Plan{Hold: true})})
			x.check(r.status == http.StatusServiceUnavailable, "status %d: %s", r.status, r.body)
			if x.capabilities.FailuresUnknown {
				x.expectUnknown()
				return
			}
			r = x.settle(message{plan: Plan{Body: []byte("second try")}})
			x.check(r.status == http.StatusCreated && string(r.body) == "second try", "status %d: %s", r.status, r.body)
		}},
	}
}

// expectUnknown checks that a failure after one effect has left a key that does not run
// again.
func (x *session) expectUnknown() {
	for range 2 {
		x.expectProblem(x.settle(message{plan: once(Plan{})}), http.StatusConflict, "outcome-unknown")
	}
	x.expectEffects(1, 1)
}

// shortTimeout skips the case if the service's timeout is too long to wait for.
func (x *session) shortTimeout() {
	if x.capabilities.Timeout > 10*time.Second {
		panic(skipped("the timeout is too long to wait for"))
	}
}

type skipped string
