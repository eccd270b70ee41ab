package conformance

import (
	"bytes"
	"net/http"
	"strings"
)

func keyCases() []Case {
	refused := func(kind string, keys ...string) func(*session) {
		return func(x *session) {
			r := x.send(message{keys: keys, noKey: keys == nil, plan: once(Plan{})})
			x.expectProblem(r, http.StatusBadRequest, kind)
			if x.target.Operation == nil {
				x.check(strings.Contains(r.header.Get("Link"), `rel="describedby"`), "Link is %q", r.header.Get("Link"))
			}
			x.expectEffects(0, 0)
		}
	}
	accepted := func(make func(key string) (first, second string)) func(*session) {
		return func(x *session) {
			one, two := make(x.key)
			first := x.run(message{keys: []string{one}, plan: once(Plan{Body: []byte("x")})})
			x.expectReplay(first, x.settle(message{keys: []string{two}, plan: once(Plan{})}))
			x.expectEffects(1, 1)
		}
	}
	const invalid = "key-invalid"
	return []Case{
		{Name: "a missing key is refused", operation: true, required: true, test: refused("key-missing")},
		{Name: "without a key every request runs", operation: true, optional: true, test: func(x *session) {
			m := message{noKey: true, plan: once(Plan{Body: []byte("first")})}
			first := x.run(m)
			m.plan.Body, m.fill = []byte("second"), 1
			x.expectOwn(first, x.run(m))
			x.expectEffects(2, 2)
		}},
		{Name: "an empty key is refused", operation: true, test: refused(invalid, "")},
		{Name: "an empty quoted key is refused", operation: true, test: refused(invalid, `""`)},
		{Name: "a key of 256 characters is refused", operation: true, test: refused(invalid, strings.Repeat("k", 256))},
		{Name: "a quoted key of 256 characters is refused", operation: true, test: refused(invalid, `"`+strings.Repeat("k", 256)+`"`)},
		{Name: "a repeated header is refused", operation: true, test: refused(invalid, "a", "b")},
		{Name: "a repeated header with one key is refused", operation: true, test: refused(invalid, "a", "a")},
		{Name: "a key with a comma is refused", operation: true, test: refused(invalid, "a,b")},
		{Name: "a key that is not ASCII is refused", operation: true, test: refused(invalid, `"schlüssel"`)},
		{Name: "a key with a control character is refused", operation: true, test: refused(invalid, "\"a\tb\"")},
		{Name: "a key without its closing quote is refused", operation: true, test: refused(invalid, `"abc`)},
		{Name: "a key with something behind it is refused", operation: true, test: refused(invalid, `"abc" def`)},
		{Name: "a key with a bad escape is refused", operation: true, test: refused(invalid, `"a\bc"`)},
		{Name: "a key of 255 characters is accepted", operation: true, test: accepted(func(key string) (string, string) {
			long := key + strings.Repeat("k", 255-len(key))
			return long, long
		})},
		{Name: "quoted and bare are the same key", operation: true, test: accepted(func(key string) (string, string) { return `"` + key + `"`, key })},
		{Name: "parameters of a key are ignored", operation: true, test: accepted(func(key string) (string, string) { return `"` + key + `";v=1;w="x y"`, `"` + key + `"` })},
		{Name: "an escaped quote is part of the key", operation: true, test: accepted(func(key string) (string, string) { return `"` + key + `\"\\"`, `"` + key + `\"\\" ` })},
		{Name: "all of a long key matters", operation: true, test: func(x *session) {
			for _, size := range []int{65, 101, 129, 200, 255} {
				long := x.key + strings.Repeat("k", size-len(x.key)-1)
				x.different(size, long+"a", long+"b")
			}
			x.expectEffects(10, 10)
		}},
		{Name: "the case of a key matters", operation: true, test: func(x *session) {
			x.different(0, x.key+"a", x.key+"A")
			x.expectEffects(2, 2)
		}},
		{Name: "no answer echoes the key", operation: true, test: func(x *session) {
			for _, m := range []message{
				{keys: []string{`"` + x.key}},
				{plan: once(Plan{})},
				{plan: once(Plan{})},
				{body: []byte("another"), plan: once(Plan{})},
			} {
				r := x.send(m)
				x.check(!bytes.Contains(r.body, []byte(x.key)), "body %s", r.body)
				for name, values := range r.header {
					x.check(!strings.Contains(strings.Join(values, " "), x.key), "header %s", name)
				}
			}
		}},
		{Name: "GET needs no key and is not stored", test: ignored(http.MethodGet)},
		{Name: "HEAD needs no key and is not stored", test: ignored(http.MethodHead)},
	}
}

// different checks that two keys are different ones: a request with each runs. fill and the
// next number are those of the requests.
func (x *session) different(fill int, one, two string) {
	first := x.run(message{keys: []string{one}, fill: fill, plan: once(Plan{Body: []byte("first")})})
	second := x.settle(message{keys: []string{two}, fill: fill + 1, plan: once(Plan{Body: []byte("second")})})
	x.expectOwn(first, second)
}

func ignored(method string) func(*session) {
	return func(x *session) {
		for _, noKey := range []bool{true, false, false} {
			r := x.send(message{method: method, noKey: noKey, plan: Plan{Status: 200}})
			x.check(r.status == http.StatusOK, "status %d", r.status)
			x.check(!x.marked(r), "it was replayed")
		}
	}
}
