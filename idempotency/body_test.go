package idempotency_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/testserver"
)

func typed(contentType string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Content-Type", contentType) }
}

// formOf returns a multipart form of a field and a file.
func formOf(t *testing.T, amount, file string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	if err := w.WriteField("amount", amount); err != nil {
		t.Fatal(err)
	}
	part, err := w.CreateFormFile("file", "name")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(part, file)
	_ = w.Close()
	return b.String(), w.FormDataContentType()
}

// A body that an outer middleware has parsed is compared, or the request is refused.
func TestMiddleware_ComparesABodyThatWasReadBefore(t *testing.T) {
	t.Parallel()
	const urlencoded = "application/x-www-form-urlencoded"
	parsing := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = r.FormValue("csrf")
			next.ServeHTTP(w, r)
		})
	}
	pay := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "paid ", r.FormValue("amount")) })
	engine := func() http.Handler { return parsing(newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(pay)) }
	one, type1 := formOf(t, "1", "content")
	same, type2 := formOf(t, "1", "content")
	thousand, type3 := formOf(t, "1000", "content")
	file, type4 := formOf(t, "1", "another")
	for name, c := range map[string]struct{ first, firstType, second, secondType, want string }{
		"a form":                           {"amount=1", urlencoded, "amount=1", urlencoded, "paid 1"},
		"a changed form":                   {"amount=1", urlencoded, "amount=1000", urlencoded, "key-reused"},
		"multipart, another boundary":      {one, type1, same, type2, "paid 1"},
		"multipart with another field":     {one, type1, thousand, type3, "key-reused"},
		"multipart with another file":      {one, type1, file, type4, "key-reused"},
		"JSON, which no form parser reads": {`{"amount":1}`, "application/json", `{"amount":1000}`, "application/json", "key-reused"},
	} {
		handler := engine()
		first := do(t, handler, post("/pay", c.first, typed(c.firstType)))
		second := do(t, handler, post("/pay", c.second, typed(c.secondType)))
		if got := second.Body.String(); first.Code != http.StatusOK || got != c.want && problemOf(second) != c.want {
			t.Errorf("%s: %d, then %d %s", name, first.Code, second.Code, got)
		}
	}
	taken := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(pay)
	for _, c := range []struct{ length, read int64 }{{12, 3}, {12, 12}, {-1, 12}} {
		w := do(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.ContentLength = c.length // -1 is that of a chunked body
			_, _ = io.CopyN(io.Discard, r.Body, c.read)
			taken.ServeHTTP(w, r)
		}), post("/pay", `{"amount":1}`, typed("application/json")))
		expectProblem(t, w, http.StatusInternalServerError, "internal")
	}
}

// An outer middleware that looks for a form and finds none leaves the body as it is.
func TestMiddleware_ComparesABodyThatNoFormWasFoundIn(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "paid %s", body)
	}))
	looking := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = r.MultipartReader()
		engine.ServeHTTP(w, r)
	})
	do(t, looking, post("/pay", `{"amount":1}`, typed("application/json")))
	if w := do(t, looking, post("/pay", `{"amount":1000}`, typed("application/json"))); problemOf(w) != "key-reused" {
		t.Errorf("got %d %s", w.Code, w.Body)
	}
}

// Two endpoints whose prefix was removed stay different, also without a pattern.
func TestMiddleware_ComparesThePathThatWasAskedFor(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Scope = idempotency.SingleTenant() })
	to := func(name string) http.Handler {
		return http.StripPrefix("/"+name, engine.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "to ", name) })))
	}
	eu, us := to("eu"), to("us")
	for range 2 {
		if w := do(t, eu, post("/eu/orders", "x")); w.Body.String() != "to eu" {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
		if w := do(t, us, post("/us/orders", "x")); w.Body.String() != "to us" {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
	}
}

func TestMiddleware_ASemicolonOfABareKeyIsPartOfIt(t *testing.T) {
	t.Parallel()
	n := 0
	handler := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		fmt.Fprint(w, n)
	}))
	for _, key := range []string{"user7;order-a", "user7;order-b"} {
		do(t, handler, post("/", "x", withKey(key)))
	}
	if n != 2 {
		t.Errorf("%d runs of two keys", n)
	}
}

// Requests of one route that differ in anything else are different requests.
func TestMiddleware_ComparesTheWholeRequest(t *testing.T) {
	t.Parallel()
	engine := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Scope = idempotency.SingleTenant() })
	mux := http.NewServeMux()
	mux.Handle("POST /orders/{id}/pay", engine.Middleware(ok("paid")))
	plain := typed("text/plain")
	do(t, mux, post("/orders/1/pay?currency=eur", "10", plain))
	for what, r := range map[string]*http.Request{
		"path":         post("/orders/2/pay?currency=eur", "10", plain),
		"query":        post("/orders/1/pay?currency=usd", "10", plain),
		"content type": post("/orders/1/pay?currency=eur", "10", typed("application/json")),
		"body":         post("/orders/1/pay?currency=eur", "1000", plain),
	} {
		if w := do(t, mux, r); problemOf(w) != "key-reused" {
			t.Errorf("another %s: %d %s", what, w.Code, w.Body)
		}
	}
	if w := do(t, mux, post("/orders/1/pay?currency=eur", "10", plain)); w.Body.String() != "paid" || w.Header().Get("Idempotency-Replayed") != "true" {
		t.Errorf("the same: %d %s", w.Code, w.Body)
	}
}

// Of multipart without its last delimiter nothing could be compared.
func TestMiddleware_RefusesMultipartThatIsNone(t *testing.T) {
	t.Parallel()
	runs := 0
	handler := newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(counted(&runs))
	for _, body := range []string{
		"", "amount=1", "amount=1--b--", "--b\r\nA: 1\r\n", "--b\r\nA: 1\r\n--b--\r\n", "--b\r\nA: 1\r\n\r\n10", "--b\r\n\r\n10\r\n--b",
	} {
		expectProblem(t, do(t, handler, post("/", body, typed("multipart/mixed; boundary=b"))), http.StatusUnsupportedMediaType, "unsupported-body")
	}
	if runs != 0 {
		t.Errorf("ran %d times", runs)
	}
	for _, body := range []string{"--b\r\n\r\n10\r\n--b--", "--b\n\n10\n--b--\n", "--b--", "--b\r\n\r\n10\r\n--b-- \r\nepilogue"} {
		if w := do(t, handler, post("/", body, typed("multipart/mixed; boundary=b"), withKey(fmt.Sprint(len(body))))); w.Code != http.StatusOK {
			t.Errorf("%q: %d %s", body, w.Code, w.Body)
		}
	}
}

// The host, which net/http keeps apart from other headers, is compared like these.
func TestMiddleware_ComparesTheHostIfItIsAskedTo(t *testing.T) {
	t.Parallel()
	handler := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Requests.Headers = []string{"host"} }).Middleware(ok("paid"))
	to := func(host string) func(*http.Request) { return func(r *http.Request) { r.Host = host } }
	do(t, handler, post("/", "x", to("a.example")))
	if w := do(t, handler, post("/", "x", to("b.example"))); problemOf(w) != "key-reused" {
		t.Errorf("another host: %d %s", w.Code, w.Body)
	}
	if w := do(t, handler, post("/", "x", to("a.example"))); w.Body.String() != "paid" {
		t.Errorf("the same: %d %s", w.Code, w.Body)
	}
}

// A handler's timeout begins when its request has been read.
func TestTxMiddleware_ASlowUploadHasAllItsTime(t *testing.T) {
	onEachDB(t, func(t *testing.T, p *testDB) {
		engine := p.engine(t, func(c *idempotency.Config) { c.Timeout, c.Failures.Lease = 3*time.Second, 4*time.Second })
		server := httptest.NewServer(engine.TxMiddleware(ok("ran")))
		defer server.Close()
		reader, writer := io.Pipe()
		go func() {
			_, _ = writer.Write([]byte("a"))
			testserver.Pause(t.Context(), 5*time.Second)
			_ = writer.Close()
		}()
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, reader)
		r.Header.Set("Idempotency-Key", "key")
		response, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if body, _ := io.ReadAll(response.Body); string(body) != "ran" {
			t.Errorf("%d %s", response.StatusCode, body)
		}
	})
}

// A client that breaks off or is too slow gets the problem, and may send the request again.
func TestMiddleware_TellsABrokenBodyFromASlowOne(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(newEngine(t, &idempotency.MemoryStore{}, nil).Middleware(ok("ran")))
	server.Config.ReadTimeout = 3 * time.Second
	server.Start()
	defer server.Close()
	for text, want := range map[string]string{
		"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n": "400 body-broken",
		"Content-Length: 5\r\n\r\nab":                    "408 body-timeout",
	} {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nIdempotency-Key: key\r\n%s", text)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		_, _ = io.Copy(w, response.Body)
		if got := fmt.Sprint(response.StatusCode, " ", problemOf(w)); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
		_ = conn.Close()
	}
}

// allocated returns how much work allocates, in bytes.
func allocated(work func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	work()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Memory use is proportional to the size of the request.
func TestMiddleware_BodiesOfStrangersAreCheap(t *testing.T) {
	handler := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) { c.Requests.Body = idempotency.BodyJSON }).Middleware(ok("ran"))
	const most = 24 << 20
	parts := strings.Repeat("--b\r\n\r\n\r\n", 1<<20/9)
	w := httptest.NewRecorder()
	if n := allocated(func() { handler.ServeHTTP(w, post("/", parts, typed("multipart/form-data; boundary=b"))) }); n > most {
		t.Errorf("%d parts allocate %d MiB", 1<<20/9, n>>20)
	}
	expectProblem(t, w, http.StatusUnsupportedMediaType, "unsupported-body")
	few, contentType := formOf(t, "1", "content")
	if w := do(t, handler, post("/", few, typed(contentType))); w.Code != http.StatusOK {
		t.Errorf("a small form: %d", w.Code)
	}
	for _, depth := range []int{100, 500} {
		for _, member := range []string{`{"a":`, `{"b":1,"a":`} {
			n := (1<<20 - 1000) / 2
			body := strings.Repeat(member, depth) + `"` + strings.Repeat("x", n) + `"` + strings.Repeat("}", depth)
			var canonical bool
			if n := allocated(func() { _, canonical = idempotency.CanonicalJSON([]byte(body)) }); n > most {
				t.Errorf("nested %d deep: %d MiB", depth, n>>20)
			}
			if canonical != (depth == 100) {
				t.Errorf("nested %d deep: %t", depth, canonical)
			}
		}
	}
}
