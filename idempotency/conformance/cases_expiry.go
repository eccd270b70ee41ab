package conformance

import "net/http"

// expiryCases returns the cases for answers that expire and are purged, which takes hooks.
func expiryCases() []Case {
	return []Case{
		{Name: "an expired key runs again, or is refused as expired", operation: true, expire: true, test: func(x *session) {
			first := x.run(message{plan: once(Plan{Body: []byte("first")})})
			x.hook("Expire", x.target.Hooks.Expire)
			x.expectExpired(first)
		}},
		{Name: "a purge keeps what has not expired", operation: true, purge: true, test: func(x *session) {
			m := message{plan: once(Plan{Body: []byte("kept")})}
			first := x.run(m)
			x.hook("Purge", x.target.Hooks.Purge)
			x.expectReplay(first, x.settle(m))
			x.expectEffects(1, 1)
		}},
		{Name: "a purge removes what has expired, and that only", operation: true, expire: true, purge: true, test: func(x *session) {
			old := x.run(message{plan: once(Plan{Body: []byte("first")})})
			x.hook("Expire", x.target.Hooks.Expire)
			young := message{keys: []string{unique()}, fill: 1, uncounted: true, plan: Plan{Body: []byte("young")}}
			first := x.run(young)
			x.hook("Purge", x.target.Hooks.Purge)
			x.expectReplay(first, x.settle(young))
			x.expectExpired(old)
		}},
		{Name: "a running request outlives expiry and purge", expire: true, purge: true, test: inFlight(func(x *session, _ int, m message) {
			x.hook("Expire", x.target.Hooks.Expire)
			x.hook("Purge", x.target.Hooks.Purge)
			x.check(x.inProgress(x.send(m)), "its key was given up")
		})},
	}
}

// expectExpired checks that the key of first is unknown after one effect, or refused. The
// request is the same, so that it is one that the service takes.
func (x *session) expectExpired(first *reply) {
	m := message{plan: once(Plan{Body: []byte("second")})}
	r := x.settle(m)
	if r.status == http.StatusGone {
		x.expectProblem(r, http.StatusGone, "key-expired")
		x.expectEffects(1, 1)
		return
	}
	x.expectOwn(first, r)
	x.expectReplay(r, x.settle(m))
	if x.target.Operation == nil { // an operation may know its request by more than the key
		x.expectEffects(2, 2)
	}
}
