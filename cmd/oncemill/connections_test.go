package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oncemill/oncemill/internal/testserver"
)

// serveForTest serves an endpoint, and returns its address.
func serveForTest(t *testing.T, e *endpoint) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() { e.serve(t.Context(), listener) })
	t.Cleanup(served.Wait) // the test's context has ended by then
	return listener.Addr().String()
}

func fetch(t *testing.T, url string) (code int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// Hundreds of clients that ask for the metrics and read nothing keep nobody out, and hold no more
// than their share of memory.
func TestEndpoint_AnswersBesideManyClientsThatDoNotRead(t *testing.T) {
	t.Parallel()
	page := strings.Repeat("x", 4<<20) // more than the buffers of a socket hold
	var mu sync.Mutex
	writing, most := 0, 0
	address := serveForTest(t, &endpoint{log: slog.New(slog.DiscardHandler), ready: func() error { return nil }, metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		writing++
		most = max(most, writing)
		mu.Unlock()
		_, _ = io.WriteString(w, page) // ends with an error when the connection is closed
		mu.Lock()
		writing--
		mu.Unlock()
	})})
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}()
	for i := range testserver.Rounds(300, 1000) {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		if i%2 == 0 {
			fmt.Fprint(c, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
		}
	}
	for range 3 {
		if code, body := fetch(t, "http://"+address+"/readyz"); code != http.StatusOK {
			t.Errorf("/readyz: %d %s", code, body)
		}
		if code, body := fetch(t, "http://"+address+"/metrics"); code != http.StatusOK || body != page {
			t.Errorf("/metrics: %d, %d bytes", code, len(body))
		}
	}
	for i, c := range conns[:len(conns)-endpointConns] {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d of %d is still open", i, len(conns))
			break
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if most > endpointConns+8 { // those that were closed and have not noticed yet
		t.Errorf("%d answers were written at a time", most)
	}
}

func TestEndpoint_ServesProfilesOnlyWhereAskedFor(t *testing.T) {
	t.Parallel()
	e := &endpoint{log: slog.New(slog.DiscardHandler)}
	if code, _ := get(e, "/debug/pprof/heap"); code != http.StatusNotFound {
		t.Errorf("without the flag: %d", code)
	}
	e.pprof = true
	for path, want := range map[string]int{
		"/debug/pprof/": http.StatusOK, "/debug/pprof/heap": http.StatusOK, "/debug/pprof/goroutine?debug=1": http.StatusOK,
		"/debug/pprof/cmdline": http.StatusNotFound, // it may hold the password of the database
	} {
		if code, _ := get(e, path); code != want {
			t.Errorf("%s: %d", path, code)
		}
	}
}
