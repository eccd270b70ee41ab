package conformance

import (
	"bytes"
	"net/http"
)

func sizeCases() []Case {
	return []Case{
		{Name: "a request over the cap is refused", test: func(x *session) {
			r := x.send(message{body: make([]byte, x.capabilities.MaxBody+1), plan: once(Plan{})})
			x.expectProblem(r, http.StatusRequestEntityTooLarge, "body-too-large")
			x.expectEffects(0, 0)
		}},
		{Name: "a chunked request over the cap is refused", test: func(x *session) {
			r := x.try(message{body: make([]byte, x.capabilities.MaxBody+1), chunked: true, plan: once(Plan{})})
			if r.err == nil { // the server may close while the client still sends
				x.expectProblem(r, http.StatusRequestEntityTooLarge, "body-too-large")
			}
			x.expectEffects(0, 0)
		}},
		{Name: "a request as large as the cap is taken", test: func(x *session) {
			m := message{body: bytes.Repeat([]byte("x"), int(x.capabilities.MaxBody)), plan: once(Plan{})}
			x.expectReplay(x.send(m), x.send(m))
			x.expectEffects(1, 1)
		}},
		{Name: "a request over the cap that expects 100-continue does not send its body", test: func(x *session) {
			r := x.send(message{body: make([]byte, x.capabilities.MaxBody+1), expect: true, plan: once(Plan{})})
			x.expectProblem(r, http.StatusRequestEntityTooLarge, "body-too-large")
			x.check(!r.sentBody, "the body was sent")
			x.expectEffects(0, 0)
		}},
		{Name: "Expect: 100-continue works", test: func(x *session) {
			m := message{expect: true, plan: once(Plan{Body: []byte("x")})}
			x.expectReplay(x.send(m), x.send(m))
			x.expectEffects(1, 1)
		}},
		{Name: "a response over the cap is sent once in full, and not run again", test: func(x *session) {
			size := x.capabilities.MaxResponse + 1
			m := message{plan: once(Plan{Size: size, Header: map[string][]string{"Location": {"/orders/7"}}})}
			first := x.send(m)
			x.check(first.status == http.StatusCreated && len(first.body) == size, "status %d, %d bytes", first.status, len(first.body))
			for range 2 {
				r := x.send(m)
				x.expectProblem(r, http.StatusConflict, "response-not-stored")
				x.check(r.header.Get("Location") == "/orders/7", "Location is %q", r.header.Get("Location"))
			}
			x.expectEffects(1, 1)
		}},
	}
}
