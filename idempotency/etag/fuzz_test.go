package etag_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency/etag"
)

// Whatever a client sends, a change is allowed only by a header that names the current tag.
func FuzzMatch(f *testing.F) {
	for _, value := range []string{`"a"`, `*`, ` * `, `W/"a"`, `"b", "a"`, `"b,a"`, `,,"a",`, `"a" "b"`, `"a`, "\"\x00\"", `""`, "W/", "é\xff"} {
		f.Add(value, "")
		f.Add(`"b"`, value)
	}
	f.Fuzz(func(t *testing.T, first, second string) {
		for _, name := range []string{"If-Match", "If-None-Match"} {
			r := httptest.NewRequest(http.MethodPut, "/orders/7", nil)
			r.Header[name] = []string{first, second}
			w := httptest.NewRecorder()
			allowed := etag.Match(w, r, `"a"`)
			both := first + "," + second
			switch {
			case allowed != (w.Code == http.StatusOK):
				t.Errorf("%s: %q: %t, %d", name, both, allowed, w.Code)
			case w.Code != http.StatusOK && w.Code != http.StatusBadRequest && w.Code != http.StatusPreconditionFailed:
				t.Errorf("%s: %q: %d", name, both, w.Code)
			case allowed && name == "If-Match" && !strings.Contains(both, `"a"`):
				t.Errorf("%q allows a change of \"a\"", both)
			case allowed && name == "If-None-Match" && strings.Contains(both, `,"a",`):
				t.Errorf("%q allows a change of \"a\", which exists", both)
			}
		}
	})
}
