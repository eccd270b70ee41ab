package idempotency_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/idempotency"
)

// A response that could not be recorded whole, since there is nowhere to put it, is no answer: neither now nor later.
func TestMiddleware_SendsNoPartOfAResponse(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "none"))
	for status, want := range map[int][2]string{
		http.StatusOK:         {"409 response-not-stored", "409 response-not-stored"},
		http.StatusForbidden:  {"500 internal", "500 internal"}, // the key is released
		http.StatusBadGateway: {"500 internal", "409 outcome-unknown"},
	} {
		var log bytes.Buffer
		handler := newEngine(t, &idempotency.MemoryStore{}, func(c *idempotency.Config) {
			c.Responses.MaxSize, c.Logger = 100, slog.New(slog.NewTextHandler(&log, nil))
		}).Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			for _, size := range []int{50, 200, 10} { // the last would leave a hole
				if n, err := w.Write(make([]byte, size)); (err == nil) != (size == 50) || (n == size) != (size == 50) {
					t.Errorf("%d bytes: %d, %v", size, n, err)
				}
			}
			if err := http.NewResponseController(w).Flush(); err == nil {
				t.Error("flushed")
			}
		}))
		for i, problem := range want {
			w := do(t, handler, post("/", "x"))
			if got := fmt.Sprint(w.Code, " ", problemOf(w)); got != problem {
				t.Errorf("%d, answer %d: %s", status, i, got)
			}
		}
		if !strings.Contains(log.String(), `level=ERROR msg="response not recorded"`) {
			t.Errorf("%d: logged %s", status, log.String())
		}
	}
}

// A handler that writes less than it has declared breaks its answer off, as without the middleware. Its part is not
// replayed as a whole. What is more than declared is refused, as by net/http.
func TestMiddleware_AnAnswerIsAsLongAsDeclared(t *testing.T) {
	t.Parallel()
	engine := onSQLite(t).engine(t, nil)
	for name, middleware := range map[string]func(http.Handler) http.Handler{"Middleware": engine.Middleware, "TxMiddleware": engine.TxMiddleware} {
		server := httptest.NewServer(middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "5")
			for _, part := range strings.Split(r.Header.Get("Parts"), ",") {
				if _, err := io.WriteString(w, part); errors.Is(err, http.ErrContentLength) != (part == "more") {
					t.Errorf("%s: %q: %v", name, part, err)
				}
			}
		})))
		defer server.Close()
		send := func(parts string) (int, string, error) {
			r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader(parts))
			r.Header.Set("Idempotency-Key", name+strings.ReplaceAll(parts, ",", ""))
			r.Header.Set("Parts", parts)
			response, err := server.Client().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close() //nolint:errcheck // it was read
			body, err := io.ReadAll(response.Body)
			return response.StatusCode, string(body), err
		}
		for range 2 {
			if status, body, err := send("whole,more"); status != http.StatusOK || body != "whole" || err != nil {
				t.Errorf("%s: whole: %d %q %v", name, status, body, err)
			}
		}
		if _, body, err := send("par"); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: a part, first: %q %v", name, body, err)
		}
		if status, body, err := send("par"); status != http.StatusConflict || !strings.Contains(body, "response-not-stored") || err != nil {
			t.Errorf("%s: a part, again: %d %q %v", name, status, body, err)
		}
	}
}
