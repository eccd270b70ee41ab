package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/oncemill/oncemill/status"
)

func TestEndpoint_TellsTheTruth(t *testing.T) {
	t.Parallel()
	var notReady, unreadable error
	var reads atomic.Int32
	newEndpoint := func() *endpoint {
		return &endpoint{
			ready: func() error { return notReady },
			read: func(context.Context) (*status.Status, error) {
				reads.Add(1)
				return &status.Status{DeadLetters: &status.DeadLetters{Total: status.Count{N: 3}}}, unreadable
			},
		}
	}
	e := newEndpoint()
	get := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		e.handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		return answer.Code, answer.Body.String()
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	notReady, unreadable = errors.New("the broker does not answer"), errors.New("the database does not answer")
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("a restart would not help, but /healthz says %d", code)
	}
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "the broker does not answer") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if code, body := get("/status"); code != http.StatusServiceUnavailable || !strings.Contains(body, "the database does not answer") {
		t.Errorf("/status: %d %s", code, body)
	}
	unreadable, e = nil, newEndpoint()
	reads.Store(0)
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if code, body := get("/status"); code != http.StatusOK || !strings.Contains(body, `"3 dead letters wait for a decision."`) {
				t.Errorf("/status: %d %s", code, body)
			}
		})
	}
	all.Wait()
	// On a slow machine the answer may have become too old meanwhile.
	if n := reads.Load(); n > 10 {
		t.Errorf("50 requests have read the database %d times", n)
	}
}
