package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/status"
)

func get(e *endpoint, path string) (code int, body string) {
	answer := httptest.NewRecorder()
	e.handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
	return answer.Code, answer.Body.String()
}

func TestEndpoint_TellsTheTruthAndNoSecrets(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	bad := errors.New("no route to db.internal")
	e := &endpoint{
		ready: func() error { return bad },
		read:  func(context.Context) (*status.Status, error) { return nil, bad },
		log:   slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if code, _ := get(e, "/healthz"); code != http.StatusOK {
		t.Errorf("a restart would not help, but /healthz says %d", code)
	}
	for _, path := range []string{"/readyz", "/status"} {
		if code, body := get(e, path); code != http.StatusServiceUnavailable || strings.Contains(body, "db.internal") {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if n := strings.Count(log.String(), "db.internal"); n != 2 {
		t.Errorf("the log has the reason %d times: %s", n, &log)
	}
	e.ready = func() error { return nil }
	if code, body := get(e, "/readyz"); code != http.StatusOK {
		t.Errorf("/readyz: %d %s", code, body)
	}
}

// However many ask, the database is read once at a time, and not more often than it can bear.
func TestEndpoint_ReadsOnceForAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		e := &endpoint{log: slog.New(slog.DiscardHandler), read: func(ctx context.Context) (*status.Status, error) {
			reads++
			time.Sleep(3 * time.Second) // of the bubble
			return &status.Status{DeadLetters: &status.DeadLetters{Open: []status.Letters{{State: dlq.StateDead, Count: status.Count{N: 3}}}}}, ctx.Err()
		}}
		all := func() {
			var group sync.WaitGroup
			for range 50 {
				group.Go(func() {
					if code, body := get(e, "/status"); code != http.StatusOK || !strings.Contains(body, `"3 dead letters wait for a decision."`) {
						t.Errorf("/status: %d %s", code, body)
					}
				})
			}
			group.Wait()
		}
		all()
		all()
		if reads != 1 {
			t.Errorf("the database was read %d times for 100 requests", reads)
		}
		time.Sleep(31 * time.Second)
		all()
		if reads != 2 {
			t.Errorf("the database was read %d times", reads)
		}
		// A client that does not wait gets nothing, and the others do not suffer.
		time.Sleep(31 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		answer := httptest.NewRecorder()
		e.handler().ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodGet, "/status", nil))
		all()
		if answer.Body.Len() > 0 || reads != 3 {
			t.Errorf("%q, read %d times", answer.Body, reads)
		}
	})
}

// A worker that can deliver is not ready while messages wait for too long, and the database is not
// read more often for that.
func TestEndpoint_IsNotReadyWhileMessagesAreLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var oldest, aside, refused time.Duration
		var failure error
		locked, reads := false, 0
		e := &endpoint{late: time.Minute, log: slog.New(slog.DiscardHandler), ready: func() error { return nil }, read: func(context.Context) (*status.Status, error) {
			reads++
			if locked {
				return &status.Status{Silent: []string{"outbox"}}, nil
			}
			return &status.Status{
				Outbox: &status.Outbox{Oldest: status.Age(oldest)},
				Relay:  &status.Relay{Oldest: status.Age(max(aside, refused)), OldestSetAside: status.Age(aside)},
			}, failure
		}}
		expect := func(want int) {
			t.Helper()
			for range 10 {
				if code, body := get(e, "/readyz"); code != want {
					t.Errorf("the oldest message has waited for %v: %d %s", oldest, code, body)
				}
			}
			time.Sleep(statusAge) // of the bubble
		}
		expect(http.StatusOK)
		oldest = 2 * time.Minute
		expect(http.StatusServiceUnavailable)
		oldest, aside = 0, 2*time.Minute // it has left the outbox, and nobody delivers it
		expect(http.StatusServiceUnavailable)
		aside, refused = 0, 2*time.Minute // one message is at fault, and becomes a dead letter
		expect(http.StatusOK)
		oldest, refused = 2*time.Minute, 0
		e.late = 0
		expect(http.StatusOK)
		e.late, failure = time.Minute, errors.New("silent")
		expect(http.StatusServiceUnavailable)
		locked, failure = true, nil // nobody knows how old the messages are
		expect(http.StatusServiceUnavailable)
		if reads != 6 {
			t.Errorf("the database was read %d times", reads)
		}
	})
}
