package conformance

import (
	"bytes"
	"encoding/json"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
)

// sameCases returns the cases for which requests count as the same, and which do not.
func sameCases() []Case {
	// distinct sends two requests with one key: the second one is refused, or runs as a
	// request of its own. It never gets the first one's answer.
	distinct := func(first, second message) func(*session) {
		return func(x *session) {
			one := x.run(first.planned("first"))
			r := x.settle(second.planned("second"))
			if r.status >= http.StatusBadRequest {
				x.expectRefused(r)
				x.expectEffects(1, 1)
				return
			}
			x.expectOwn(one, r)
			if x.target.Operation == nil { // an operation may know its request by more than the key
				x.expectEffects(2, 2)
			}
		}
	}
	same := func(first, second message) func(*session) {
		return func(x *session) {
			x.expectReplay(x.run(first.planned("first")), x.settle(second.planned("second")))
			x.expectEffects(1, 1)
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
		{Name: "another body is refused", operation: true, given: other, test: func(x *session) {
			first := x.run(message{plan: once(Plan{Body: []byte("first")})})
			another := []byte("another")
			if x.target.Operation != nil {
				another = x.target.Operation.Other
			}
			x.expectRefused(x.send(message{body: another, plan: once(Plan{})}))
			x.expectReplay(first, x.settle(message{plan: once(Plan{})}))
			x.expectEffects(1, 1)
		}},
		{Name: "another path or query is another request", operation: true, given: func(o *Operation) string {
			if len(o.OtherPaths) == 0 {
				return "other paths (Operation.OtherPaths, --other-path)"
			}
			return ""
		}, test: func(x *session) {
			if x.target.Operation == nil {
				distinct(message{path: "/orders"}, message{path: "/payments"})(x)
				return
			}
			for _, path := range x.target.Operation.OtherPaths {
				x.next()
				distinct(message{}, message{path: path})(x)
			}
		}},
		{Name: "/orders/1/pay and /orders/2/pay are not confused", test: distinct(message{path: "/orders/1/pay"}, message{path: "/orders/2/pay"})},
		{Name: "an escaped slash is not a slash", test: distinct(message{path: "/orders/a%2Fb"}, message{path: "/orders/a/b"})},
		{Name: "another query is another request", test: distinct(message{query: "a=1"}, message{query: "a=2"})},
		{Name: "the order of a query's values matters", test: distinct(message{query: "a=1&a=2"}, message{query: "a=2&a=1"})},
		{Name: "a query is not a concatenation", test: distinct(message{query: "a=1&b=2"}, message{query: "a=1%26b%3D2"})},
		{Name: "the order of a query's names does not matter", test: same(message{query: "a=1&b=2"}, message{query: "b=2&a=1"})},
		{Name: "another method is another request", operation: true, given: func(o *Operation) string {
			if o.OtherMethod == "" {
				return "another method (Operation.OtherMethod, --other-method)"
			}
			return ""
		}, test: func(x *session) {
			method := http.MethodPut
			if x.target.Operation != nil {
				method = x.target.Operation.OtherMethod
			}
			distinct(message{}, message{method: method})(x)
		}},
		{Name: "another content type is another request", test: distinct(message{header: typed("application/json")}, message{header: typed("text/plain")})},
		{Name: "the case of a content type does not matter", test: same(message{header: typed("text/plain; charset=utf-8")}, message{header: typed("Text/Plain;charset=utf-8")})},
		{Name: "headers that are not chosen do not matter", operation: true, test: same(message{header: http.Header{"User-Agent": {"a"}}}, message{header: http.Header{"User-Agent": {"b"}}})},
		{Name: "9007199254740993 is not 9007199254740992", test: distinct(message{body: []byte(`{"n": 9007199254740993}`)}, message{body: []byte(`{"n": 9007199254740992}`)})},
		{Name: "an object with a name twice is not one with either", test: func(x *session) {
			bodies := []string{`{"n":1,"n":2}`, `{"n":2,"n":1}`, `{"n":2}`, `{"n":1}`, `{"a":{"n":1,"n":2}}`, `{"a":{"n":2}}`}
			for i, body := range bodies {
				for _, other := range bodies[i+1:] {
					x.key = unique()
					first := x.run(message{body: []byte(body), plan: Plan{Body: []byte(body)}})
					r := x.settle(message{body: []byte(other), plan: Plan{Body: []byte(other)}})
					x.check(string(first.body) == body, "status %d: %s", first.status, first.body)
					x.check(r.status == http.StatusUnprocessableEntity || string(r.body) == other, "%s gets the answer to %s", other, body)
				}
			}
		}},
		{Name: "a body with a name twice is not one with it once", operation: true, given: func(o *Operation) string {
			if _, ok := twice(o); !ok {
				return "a body that is a JSON object (Operation.Body, --body)"
			}
			return ""
		}, test: func(x *session) {
			if x.target.Operation == nil {
				distinct(message{body: []byte(`{"n":2}`)}, message{body: []byte(`{"n":1,"n":2}`)})(x)
				return
			}
			body, _ := twice(x.target.Operation)
			first := x.run(message{})
			if r := x.settle(message{body: body}); r.status < http.StatusBadRequest { // it may refuse the body
				x.expectOwn(first, r)
			}
			x.expectReplay(first, x.settle(message{}))
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
		{Name: "a chunked body is the same as one with a length", operation: true, given: func(o *Operation) string {
			if len(o.Body) == 0 {
				return "a body (Operation.Body, --body)"
			}
			return ""
		}, test: same(message{}, message{chunked: true})},
		{Name: "multipart with another boundary is the same request", test: same(form("one", part), form("two", part))},
		{Name: "multipart with another part is another request", test: distinct(form("one", part), form("one", part, part))},
		{Name: "multipart with another name is another request", test: distinct(form("one", part), form("one", [2]string{"b", "1"}))},
		{Name: "multipart that is none is refused", test: func(x *session) {
			r := x.send(message{body: []byte("--one\r\nbroken"), header: typed("multipart/form-data; boundary=one"), plan: once(Plan{})})
			x.expectProblem(r, http.StatusUnsupportedMediaType, "unsupported-body")
			x.expectEffects(0, 0)
		}},
	}
}

// planned gives m one effect, and an answer.
func (m message) planned(body string) message {
	m.plan = once(Plan{Body: []byte(body)})
	return m
}

// other is the need for another body.
func other(o *Operation) string {
	if len(o.Other) == 0 {
		return "another body (Operation.Other, --other)"
	}
	return ""
}

// twice returns an operation's body with the first name of its object twice, with another
// value in front of its own; false if it is no object with a name.
func twice(o *Operation) ([]byte, bool) {
	decoder := json.NewDecoder(strings.NewReader(valuesOf("").fill(string(o.Body))))
	if open, err := decoder.Token(); err != nil || open != json.Delim('{') {
		return nil, false
	}
	token, err := decoder.Token()
	name, ok := token.(string)
	if err != nil || !ok {
		return nil, false
	}
	quoted, err := json.Marshal(name)
	at := bytes.IndexByte(o.Body, '{') + 1
	return slices.Concat(o.Body[:at], quoted, []byte(`:null,`), o.Body[at:]), err == nil
}
