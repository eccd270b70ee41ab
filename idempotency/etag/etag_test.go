package etag_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	"github.com/oncemill/oncemill/idempotency/etag"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

func TestMatch(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		header, value string
		current       etag.Tag
		status        int // 200: it may change the resource
	}{
		{"If-Match", `"a"`, `"a"`, 200},
		{"If-Match", `"b"`, `"a"`, 412},
		{"If-Match", `"b", "a"`, `"a"`, 200},
		{"If-Match", `"b,a", "c"`, `"a"`, 412},
		{"If-Match", `W/"a"`, `"a"`, 412},
		{"If-Match", `W/"a"`, `W/"a"`, 412},
		{"If-Match", `*`, `"a"`, 200},
		{"If-Match", `*`, "", 412},
		{"If-Match", `"a"`, "", 412},
		{"If-Match", `a`, `"a"`, 400},
		{"If-Match", `"a`, `"a"`, 400},
		{"If-Match", `"a" "b"`, `"a"`, 400},
		{"If-Match", ``, `"a"`, 400},
		{"If-None-Match", `*`, "", 200},
		{"If-None-Match", `*`, `"a"`, 412},
		{"If-None-Match", `W/"a"`, `"a"`, 412},
		{"If-None-Match", `"b"`, `"a"`, 200},
		{"X-Other", `"a"`, `"a"`, 428},
	} {
		r := httptest.NewRequest(http.MethodPut, "/orders/7", nil)
		r.Header.Set(c.header, c.value)
		w := httptest.NewRecorder()
		ok := etag.Match(w, r, c.current)
		if ok != (c.status == 200) || w.Code != c.status {
			t.Errorf("%s: %s with %s: %t, %d", c.header, c.value, c.current, ok, w.Code)
		}
		if c.status == 412 && w.Header().Get("Etag") != string(c.current) {
			t.Errorf("the current tag is not told: %q", w.Header())
		}
	}
}

func TestOf(t *testing.T) {
	t.Parallel()
	one, same := etag.Of(7), etag.Of(7)
	if one != same || etag.Of(7) == etag.Of(8) || len(etag.Of(7)) != 18 {
		t.Errorf("%s %s", etag.Of(7), etag.Of(8))
	}
}
