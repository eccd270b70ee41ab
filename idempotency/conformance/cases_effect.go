package conformance

import "net/http"

// effectCases returns the cases for what transactions add.
func effectCases() []Case {
	return []Case{
		{Name: "a failed attempt leaves neither effect nor message", tx: true, test: func(x *session) {
			for _, status := range []int{500, 503, 401, 429} {
				x.send(message{plan: once(Plan{Status: status})})
			}
			x.expectEffects(0, 0)
			x.send(message{plan: once(Plan{})})
			x.expectEffects(1, 1)
		}},
		{Name: "a stored error leaves neither effect nor message", tx: true, test: func(x *session) {
			m := message{plan: once(Plan{Status: http.StatusUnprocessableEntity, Body: []byte("sold out")})}
			x.expectReplay(x.send(m), x.send(m))
			x.expectEffects(0, 0)
		}},
		{Name: "a redirect commits", tx: true, test: func(x *session) {
			m := message{plan: once(Plan{Status: http.StatusSeeOther, Header: map[string][]string{"Location": {"/orders/7"}}})}
			x.expectReplay(x.send(m), x.send(m))
			x.expectEffects(1, 1)
		}},
		{Name: "several effects and messages commit together", tx: true, test: func(x *session) {
			m := message{plan: Plan{Effects: 3, Messages: 5}}
			x.expectReplay(x.send(m), x.send(m))
			x.expectEffects(3, 5)
		}},
		{Name: "a handler that ends its transaction leaves nothing", tx: true, test: func(x *session) {
			r := x.send(message{plan: once(Plan{EndTx: true})})
			x.check(r.status >= http.StatusInternalServerError, "status %d: %s", r.status, r.body)
			x.expectEffects(0, 0)
			r = x.send(message{plan: once(Plan{})})
			x.check(r.status == http.StatusCreated, "status %d: %s", r.status, r.body)
			x.expectEffects(1, 1)
		}},
		{Name: "the outbox holds one message after ten retries, half of them failed", tx: true, test: func(x *session) {
			for i := range 10 {
				plan := once(Plan{})
				if i < 5 {
					plan.Status = http.StatusInternalServerError
				}
				x.send(message{plan: plan})
			}
			x.expectEffects(1, 1)
		}},
	}
}
