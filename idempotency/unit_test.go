package idempotency_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

func TestParseKey(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		`abc`: "abc", `"abc"`: "abc", ` "abc" `: "abc", `"a b"`: "a b", `"a\"b\\c"`: `a"b\c`,
		`"abc";a`: "abc", `"abc";a=1;b="x;y"; c=?1`: "abc", `abc;a=1`: "abc;a=1", `"abc;a"`: "abc;a", `"a,b"`: "a,b",
		"8e03978e-40d5-43e8-bc93-6e9bdb8c4c54": "8e03978e-40d5-43e8-bc93-6e9bdb8c4c54",
		"a/b+c==":                              "a/b+c==", strings.Repeat("k", 255): strings.Repeat("k", 255),
	} {
		if key, err := idempotency.ParseKey(value); key != want || err != nil {
			t.Errorf("%s: got %q, %v", value, key, err)
		}
	}
	for _, value := range []string{
		"", " ", `""`, `"abc`, `abc"`, `a,b`, `"a" b`, `a b`, `"a\b"`, "a\x00", "\"a\x7f\"", "ä", `"ä"`, `"a";`, `"a";=1`, `"a";A`, `"a";a=`,
		`"a" ;b`, `"a\`, strings.Repeat("k", 256), `"` + strings.Repeat("k", 256) + `"`,
	} {
		if key, err := idempotency.ParseKey(value); err == nil {
			t.Errorf("%q: got %q", value, key)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	for _, s := range []string{`"abc"`, `abc`, `"a\"b";x=1`, `";`, `"\\"`, "a;b=\"c\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		key, err := idempotency.ParseKey(value)
		if err != nil {
			if key != "" {
				t.Errorf("an error and a key: %q", key)
			}
			return
		}
		if len(key) < 1 || len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q is no key", key)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		if back, err := idempotency.ParseKey(quoted); back != key || err != nil {
			t.Errorf("%q quoted is %q: %v", key, back, err)
		}
	})
}

func TestCanonicalJSON(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		` { "b" : [ 1 , 2.50, 1e3 ], "a" : null } `: `{"a":null,"b":[1,2.50,1e3]}`,
		`"\u0041\n\u00e4"`:                          "\"A\\u000aä\"",
		`9007199254740993`:                          `9007199254740993`,
		`[]`:                                        `[]`, `{}`: `{}`, `true`: `true`, `{"a":{"c":1,"b":-0}}`: `{"a":{"b":-0,"c":1}}`,
	} {
		if got, ok := idempotency.CanonicalJSON([]byte(body)); string(got) != want || !ok {
			t.Errorf("%s: got %s %t", body, got, ok)
		}
	}
	for _, body := range []string{
		``, `{`, `{"a":1,"a":1}`, `{"a":{"b":1,"b":2}}`, `[1] 2`, `"\ud800"`, `"\ud800x"`, "\"\xff\"", `{"\ud800":1}`,
		strings.Repeat("[", 600) + strings.Repeat("]", 600), "\ufeff1",
	} {
		if got, ok := idempotency.CanonicalJSON([]byte(body)); ok {
			t.Errorf("%.20s: got %s", body, got)
		}
	}
}

// Bodies with the same canonical form are equal to a parser that keeps numbers as they are,
// and the canonical form of a canonical form is itself.
func FuzzCanonicalJSON(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.0,{"b":null}],"c":"\u0041"}`, `[1e5,-0,"\\\""]`, `{"a":1,"a":2}`, `"\ud83d\ude00"`, `"\ud800"`} {
		f.Add([]byte(s))
	}
	parse := func(b []byte) (v any, err error) {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err = d.Decode(&v)
		return v, err
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		canonical, ok := idempotency.CanonicalJSON(body)
		if !ok {
			return
		}
		before, err1 := parse(body)
		after, err2 := parse(canonical)
		if err1 != nil || err2 != nil || !reflect.DeepEqual(before, after) {
			t.Errorf("%s became %s: %v %v", body, canonical, err1, err2)
		}
		if again, ok := idempotency.CanonicalJSON(canonical); !ok || !bytes.Equal(again, canonical) {
			t.Errorf("%s became %s", canonical, again)
		}
	})
}

// Two lists of fields have the same hash only if they are the same list.
func FuzzFraming(f *testing.F) {
	f.Add("ab", "c", "a", "bc")
	f.Add("", "a", "a", "")
	f.Add("\x00", "", "", "\x00")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		same := a == c && b == d
		if (idempotency.FrameForTest(a, b) == idempotency.FrameForTest(c, d)) != same {
			t.Errorf("%q %q and %q %q", a, b, c, d)
		}
		if idempotency.FrameForTest(a, b) == idempotency.FrameForTest(a+b) {
			t.Errorf("%q %q is %q", a, b, a+b)
		}
	})
}

// Whatever a handler does, the first answer is what it would be without the middleware, and
// the replay equals the first answer.
func FuzzRecorder(f *testing.F) {
	f.Add(uint16(201), "X-A", "b", []byte("body"), uint8(3), false)
	f.Add(uint16(204), "Location", "/x", []byte{}, uint8(0), true)
	f.Add(uint16(0), "Vary", "Accept", bytes.Repeat([]byte{0xff}, 100), uint8(1), true)
	f.Fuzz(func(t *testing.T, status uint16, name, value string, body []byte, chunks uint8, add bool) {
		if strings.ContainsFunc(name+value, func(r rune) bool { return r < '!' || r > '~' || r == ':' }) || name == "" {
			return
		}
		if http.CanonicalHeaderKey(name) == "Idempotency-Replayed" || http.CanonicalHeaderKey(name) == "Content-Length" || strings.HasPrefix(http.CanonicalHeaderKey(name), "Trailer") {
			return
		}
		code := int(status)
		if code < 200 || code > 599 {
			code = 0
		}
		handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if add {
				w.Header().Add(name, value)
			} else {
				w.Header().Set(name, value)
			}
			if code != 0 {
				w.WriteHeader(code)
			}
			for i := 0; i < len(body); i += int(chunks) + 1 {
				_, _ = w.Write(body[i:min(len(body), i+int(chunks)+1)])
			}
		})
		engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Responses.Storable = idempotency.StorableAll })
		send := func(h http.Handler) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			w.Header().Set("Vary", "Origin")
			h.ServeHTTP(w, post("/", "x"))
			return w
		}
		bare, first, again := send(handler), send(engine.Middleware(handler)), send(engine.Middleware(handler))
		for i, w := range []*httptest.ResponseRecorder{first, again} {
			bareBody, ours := bare.Body.String(), w.Body.String()
			if code == 204 || code == 304 {
				bareBody = "" // the test's writer takes what net/http refuses
			}
			if w.Code != bare.Code || ours != bareBody {
				t.Errorf("answer %d is %d %q, want %d %q", i, w.Code, ours, bare.Code, bareBody)
			}
		}
		if again.Header().Get("Idempotency-Replayed") != "true" {
			t.Error("not replayed")
		}
		if !reflect.DeepEqual(first.Header().Values("Vary"), bare.Header().Values("Vary")) || !reflect.DeepEqual(again.Header().Values("Vary"), bare.Header().Values("Vary")) {
			t.Errorf("Vary is %q, then %q, want %q", first.Header().Values("Vary"), again.Header().Values("Vary"), bare.Header().Values("Vary"))
		}
	})
}

func TestDeriveUUID(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, nil)
	seen := map[string]string{}
	fail := true
	handler := engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, name := range []string{"a", "b"} {
			id := idempotency.DeriveUUID(r.Context(), name)
			at := r.Header.Get("Idempotency-Key") + name
			if before := seen[at]; before != "" && before != id {
				t.Errorf("%s was %s and is %s", at, before, id)
			}
			for other, taken := range seen {
				if other != at && taken == id {
					t.Errorf("%s and %s are both %s", at, other, id)
				}
			}
			if len(id) != 36 || id[14] != '8' || !strings.ContainsRune("89ab", rune(id[19])) {
				t.Errorf("%s is no UUID of version 8", id)
			}
			seen[at] = id
		}
		if fail {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	for i := range 4 {
		fail = i < 2
		do(t, handler, post("/", "x", withKey(strconv.Itoa(i%2))))
	}
	if len(seen) != 4 {
		t.Errorf("saw %v", seen)
	}
	if a, b := idempotency.DeriveUUID(t.Context(), "a"), idempotency.DeriveUUID(t.Context(), "a"); a == b || a[14] != '4' {
		t.Errorf("without a request: %s and %s", a, b)
	}
}
