package conformance

import (
	"bytes"
	"mime/multipart"
	"net/http"
	"net/textproto"
)

// sameCases returns the cases for which requests count as the same, and which do not.
func sameCases() []Case {
	// distinct sends two requests with one key: the second one is refused, or runs as a
	// request of its own. It never gets the first one's answer.
	distinct := func(first, second message) func(*session) {
		return func(x *session) {
			first.plan, second.plan = once(Plan{Body: []byte("first")}), once(Plan{Body: []byte("second")})
			x.send(first)
			r := x.send(second)
			if r.status == http.StatusUnprocessableEntity {
				x.expectProblem(r, http.StatusUnprocessableEntity, "key-reused")
				x.expectEffects(1, 1)
				return
			}
			x.check(r.status == http.StatusCreated && string(r.body) == "second" && r.header.Get("Idempotency-Replayed") == "",
				"status %d: %s", r.status, r.body)
			x.expectEffects(2, 2)
		}
	}
	same := func(first, second message) func(*session) {
		return func(x *session) {
			first.plan, second.plan = once(Plan{Body: []byte("first")}), once(Plan{Body: []byte("second")})
			x.expectReplay(x.send(first), x.send(second))
			x.expectEffects(1, 1)
		}
	}
	own := func(name, one, two string) func(*session) {
		return func(x *session) {
			for _, value := range []string{one, two} {
				r := x.send(message{header: http.Header{name: {value}}, plan: once(Plan{Body: []byte(value)})})
				x.check(r.status == http.StatusCreated && string(r.body) == value, "status %d: %s", r.status, r.body)
			}
			x.expectEffects(2, 2)
		}
	}
	typed := func(contentType string) http.Header { return http.Header{"Content-Type": {contentType}} }
	form := func(boundary string, parts ...[2]string) message {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		if err := w.SetBoundary(boundary); err != nil {
			panic(err) // only for a malformed constant
		}
		for _, part := range parts {
			p, err := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {`form-data; name="` + part[0] + `"`}})
			if err != nil {
				panic(err) // a buffer takes everything
			}
			_, _ = p.Write([]byte(part[1])) // the same
		}
		_ = w.Close() // the same
		return message{body: b.Bytes(), header: typed("multipart/form-data; boundary=" + boundary)}
	}
	part := [2]string{"a", "1"}
	return []Case{
		{Name: "another body is refused", plain: true, other: true, test: func(x *session) {
			first := x.send(message{plan: once(Plan{Body: []byte("first")})})
			other := []byte("another")
			if x.target.Plain != nil {
				other = x.target.Plain.Other
			}
			r := x.send(message{body: other, plan: once(Plan{})})
			x.check(r.status == http.StatusUnprocessableEntity || r.status == http.StatusConflict, "status %d: %s", r.status, r.body)
			if x.target.Plain == nil {
				x.expectProblem(r, http.StatusUnprocessableEntity, "key-reused")
			}
			x.expectReplay(first, x.send(message{plan: once(Plan{})}))
			x.expectEffects(1, 1)
		}},
		{Name: "/orders/1/pay and /orders/2/pay are not confused", test: distinct(message{path: "/orders/1/pay"}, message{path: "/orders/2/pay"})},
		{Name: "an escaped slash is not a slash", test: distinct(message{path: "/orders/a%2Fb"}, message{path: "/orders/a/b"})},
		{Name: "another query is another request", test: distinct(message{query: "a=1"}, message{query: "a=2"})},
		{Name: "the order of a query's values matters", test: distinct(message{query: "a=1&a=2"}, message{query: "a=2&a=1"})},
		{Name: "a query is not a concatenation", test: distinct(message{query: "a=1&b=2"}, message{query: "a=1%26b%3D2"})},
		{Name: "the order of a query's names does not matter", test: same(message{query: "a=1&b=2"}, message{query: "b=2&a=1"})},
		{Name: "another method is another request", test: distinct(message{method: http.MethodPost}, message{method: http.MethodPut})},
		{Name: "another content type is another request", test: distinct(message{header: typed("application/json")}, message{header: typed("text/plain")})},
		{Name: "the case of a content type does not matter", test: same(message{header: typed("text/plain; charset=utf-8")}, message{header: typed("Text/Plain;charset=utf-8")})},
		{Name: "headers that are not chosen do not matter", test: same(message{header: http.Header{"User-Agent": {"a"}}}, message{header: http.Header{"User-Agent": {"b"}}})},
		{Name: "9007199254740993 is not 9007199254740992", test: distinct(message{body: []byte(`{"n": 9007199254740993}`)}, message{body: []byte(`{"n": 9007199254740992}`)})},
		{Name: "an object with a name twice is not one with either", test: func(x *session) {
			bodies := []string{`{"n":1,"n":2}`, `{"n":2,"n":1}`, `{"n":2}`, `{"n":1}`}
			for i, body := range bodies {
				for _, other := range bodies[i+1:] {
					x.key = unique()
					first := x.send(message{body: []byte(body), plan: Plan{Body: []byte(body)}})
					r := x.send(message{body: []byte(other), plan: Plan{Body: []byte(other)}})
					x.check(string(first.body) == body, "status %d: %s", first.status, first.body)
					x.check(r.status == http.StatusUnprocessableEntity || string(r.body) == other, "%s gets the answer to %s", other, body)
				}
			}
		}},
		{Name: "1.0 is not 1", test: distinct(message{body: []byte(`{"n": 1.0}`)}, message{body: []byte(`{"n": 1}`)})},
		{Name: "white space in a body matters, compared as bytes", raw: true, test: distinct(message{body: []byte(`{"n": 1}`)}, message{body: []byte(`{"n":1}`)})},
		{Name: "bodies that differ after the first MiB are not confused", test: func(x *session) {
			size := 1<<20 + 100
			if int64(size) > x.capabilities.MaxBody {
				size = int(x.capabilities.MaxBody)
			}
			one := bytes.Repeat([]byte("x"), size)
			two := bytes.Clone(one)
			two[size-1] = 'y'
			distinct(message{body: one}, message{body: two})(x)
		}},
		{Name: "an empty body is not a missing one's answer", test: distinct(
			message{body: []byte{}, header: typed("text/plain")}, message{body: []byte("x"), header: typed("text/plain")})},
		{Name: "a chunked body is the same as one with a length", test: same(message{body: []byte("abc")}, message{body: []byte("abc"), chunked: true})},
		{Name: "multipart with another boundary is the same request", test: same(form("one", part), form("two", part))},
		{Name: "multipart with another part is another request", test: distinct(form("one", part), form("one", part, part))},
		{Name: "multipart with another name is another request", test: distinct(form("one", part), form("one", [2]string{"b", "1"}))},
		{Name: "multipart that is none is refused", test: func(x *session) {
			r := x.send(message{body: []byte("--one\r\nbroken"), header: typed("multipart/form-data; boundary=one"), plan: once(Plan{})})
			x.expectProblem(r, http.StatusUnsupportedMediaType, "unsupported-body")
			x.expectEffects(0, 0)
		}},
		{Name: "two tenants share no key", test: own("X-Tenant", "a", "b")},
		{Name: "two users share no key", test: own("X-User", "a", "b")},
		{Name: "tenant and user are not a concatenation", test: func(x *session) {
			for _, h := range []http.Header{{"X-Tenant": {"ab"}, "X-User": {"c"}}, {"X-Tenant": {"a"}, "X-User": {"bc"}}} {
				r := x.send(message{header: h, plan: once(Plan{})})
				x.check(r.status == http.StatusCreated && r.header.Get("Idempotency-Replayed") == "", "status %d: %s", r.status, r.body)
			}
			x.expectEffects(2, 2)
		}},
	}
}
