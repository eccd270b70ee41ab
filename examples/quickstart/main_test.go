package main

import (
	"bufio"
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// The client sends each request twice; the second key shows that the first order is done.
func TestRun_SellsOncePerKey(t *testing.T) {
	read, write := io.Pipe()
	defer log.SetOutput(log.Writer())
	log.SetOutput(write)
	defer slog.SetLogLoggerLevel(slog.SetLogLoggerLevel(slog.LevelWarn))
	listener := testserver.Listen(t)
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, t.TempDir(), address)
		_ = write.Close()
		ended <- err
	}()
	printed := make(chan string, 1000)
	go func() {
		defer close(printed)
		for lines := bufio.NewScanner(read); lines.Scan(); {
			printed <- lines.Text()
		}
	}()
	for _, key := range []string{`"1"`, `"2"`} {
		first, again := order(t, address, key), order(t, address, key)
		if first != again || !strings.HasPrefix(first, "order ") {
			t.Errorf("answered with %q and %q", first, again)
		}
		id := strings.TrimSpace(strings.TrimPrefix(first, "order "))
		for _, want := range []string{"API: +order " + id, "relay: +message " + id, "consumer: message " + id + " handled, " + strings.Trim(key, `"`) + " of tea sold"} {
			for {
				line, open := <-printed
				if !open {
					t.Fatalf("ended, and never printed %s: %v", want, <-ended)
				}
				if regexp.MustCompile(want).MatchString(line) {
					break
				}
			}
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for line := range printed {
		t.Errorf("printed a second time: %s", line)
	}
}

// order orders tea and returns the answer, as soon as the shop is open.
func order(t *testing.T, address, key string) (answer string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	testserver.Eventually(t, "the order is accepted", func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/orders", strings.NewReader("item=tea"))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		request.Header.Set("Idempotency-Key", key)
		response, err := client.Do(request)
		if err != nil {
			return false // it does not listen yet
		}
		body, err := io.ReadAll(response.Body)
		if err != nil || response.Body.Close() != nil {
			t.Error("the answer cannot be read")
		}
		answer = string(body)
		return response.StatusCode == http.StatusCreated
	})
	return answer
}
