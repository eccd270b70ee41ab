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
			if x.target.Plain == nil {
				x.check(strings.Contains(r.header.Get("Link"), `rel="describedby"`), "Link is %q", r.header.Get("Link"))
			}
			x.expectEffects(0, 0)
		}
	}
	accepted := func(make func(key string) (first, second string)) func(*session) {
		return func(x *session) {
			one, two := make(x.key)
			first := x.send(message{keys: []string{one}, plan: once(Plan{Body: []byte("x")})})
			x.check(first.status < 300, "status %d: %s", first.status, first.body)
			x.expectReplay(first, x.send(message{keys: []string{two}, plan: once(Plan{})}))
			x.expectEffects(1, 1)
		}
	}
	const invalid = "key-invalid"
	return []Case{
		{Name: "a missing key is refused", plain: true, key: true, test: refused("key-missing")},
		{Name: "an empty key is refused", plain: true, test: refused(invalid, "")},
		{Name: "an empty quoted key is refused", plain: true, test: refused(invalid, `""`)},
		{Name: "a key of 256 characters is refused", plain: true, test: refused(invalid, strings.Repeat("k", 256))},
		{Name: "a quoted key of 256 characters is refused", plain: true, test: refused(invalid, `"`+strings.Repeat("k", 256)+`"`)},
		{Name: "a repeated header is refused", plain: true, test: refused(invalid, "a", "b")},
		{Name: "a repeated header with one key is refused", plain: true, test: refused(invalid, "a", "a")},
		{Name: "a key with a comma is refused", test: refused(invalid, "a,b")},
		{Name: "a key that is not ASCII is refused", plain: true, test: refused(invalid, `"schlüssel"`)},
		{Name: "a key with a control character is refused", plain: true, test: refused(invalid, "\"a\tb\"")},
		{Name: "a key without its closing quote is refused", plain: true, test: refused(invalid, `"abc`)},
		{Name: "a key with something behind it is refused", test: refused(invalid, `"abc" def`)},
		{Name: "a key with a bad escape is refused", test: refused(invalid, `"a\bc"`)},
		{Name: "a key of 255 characters is accepted", test: accepted(func(key string) (string, string) {
			long := key + strings.Repeat("k", 255-len(key))
			return long, long
		})},
		{Name: "quoted and bare are the same key", test: accepted(func(key string) (string, string) { return `"` + key + `"`, key })},
		{Name: "parameters of a key are ignored", test: accepted(func(key string) (string, string) { return `"` + key + `";v=1;w="x y"`, `"` + key + `"` })},
		{Name: "an escaped quote is part of the key", test: accepted(func(key string) (string, string) { return `"` + key + `\"\\"`, `"` + key + `\"\\" ` })},
		{Name: "all of a long key matters", test: func(x *session) {
			for _, size := range []int{65, 101, 129, 200, 255} {
				long := x.key + strings.Repeat("k", size-len(x.key)-1)
				for _, last := range []string{"a", "b"} {
					r := x.send(message{keys: []string{long + last}, plan: once(Plan{Body: []byte(last)})})
					x.check(string(r.body) == last, "keys of %d characters that differ in the last one: %s", size, r.body)
				}
			}
			x.expectEffects(10, 10)
		}},
		{Name: "the case of a key matters", test: func(x *session) {
			x.send(message{keys: []string{x.key + "a"}, plan: once(Plan{})})
			r := x.send(message{keys: []string{x.key + "A"}, plan: once(Plan{})})
			x.check(r.header.Get("Idempotency-Replayed") == "", "it was replayed")
			x.expectEffects(2, 2)
		}},
		{Name: "no answer echoes the key", test: func(x *session) {
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

func ignored(method string) func(*session) {
	return func(x *session) {
		for _, noKey := range []bool{true, false, false} {
			r := x.send(message{method: method, noKey: noKey, plan: Plan{Status: 200}})
			x.check(r.status == http.StatusOK, "status %d", r.status)
			x.check(r.header.Get("Idempotency-Replayed") == "", "it was replayed")
		}
	}
}
