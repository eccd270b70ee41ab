package client_test

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/oncemill/oncemill/idempotency/client"
	"github.com/oncemill/oncemill/internal/testserver"
)

func TestMain(m *testing.M) { os.Exit(testserver.Main(m)) }

// script is a RoundTripper that answers with what it is told, in turn; the last
// one stays.
type script struct {
	t       *testing.T
	answers []*http.Response
	keys    []string
	bodies  []string
	times   []time.Time
}

var errReset = errors.New("connection reset")

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	s.keys = append(s.keys, r.Header.Get("Idempotency-Key"))
	s.times = append(s.times, time.Now())
	if r.Body != nil {
		text, err := io.ReadAll(r.Body)
		if err != nil {
			s.t.Error(err)
		}
		s.bodies = append(s.bodies, string(text))
	}
	answer := s.answers[0]
	if len(s.answers) > 1 {
		s.answers = s.answers[1:]
	}
	if answer == nil {
		return nil, errReset
	}
	return answer, nil
}

func answer(status int, body string, header ...string) *http.Response {
	r := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func inProgress() *http.Response {
	return answer(409, `{"type":"https://example.com/doc#in-progress"}`, "Content-Type", "application/problem+json", "Retry-After", "5")
}

func send(t *testing.T, s *script, body io.Reader) (*http.Response, error) {
	t.Helper()
	s.t = t
	transport, err := client.New(s, client.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://shop.example/orders", body)
	if err != nil {
		t.Fatal(err)
	}
	return transport.RoundTrip(r)
}

func TestTransport_RetriesWithTheSameKeyAndBody(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]func() io.Reader{
		"with GetBody":    func() io.Reader { return strings.NewReader("order") },
		"without GetBody": func() io.Reader { return io.MultiReader(strings.NewReader("order")) },
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &script{answers: []*http.Response{nil, answer(503, ""), answer(201, "made")}}
			response, err := send(t, s, body())
			if err != nil || response.StatusCode != http.StatusCreated {
				t.Errorf("%s: %v %v", name, response, err)
			}
			if len(s.keys) != 3 || s.keys[0] == "" || s.keys[1] != s.keys[0] || s.keys[2] != s.keys[0] {
				t.Errorf("%s: keys %q", name, s.keys)
			}
			if strings.Join(s.bodies, ",") != "order,order,order" {
				t.Errorf("%s: bodies %q", name, s.bodies)
			}
		})
	}
}

func TestTransport_RetriesWhatMaySucceedLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			first *http.Response
			sent  int
		}{
			"reset": {nil, 2}, "408": {answer(408, ""), 2}, "425": {answer(425, ""), 2}, "429": {answer(429, ""), 2}, "502": {answer(502, ""), 2}, "503": {answer(503, ""), 2}, "504": {answer(504, ""), 2},
			"in progress": {inProgress(), 2}, "409 with Retry-After": {answer(409, "", "Retry-After", "1"), 2},
			"422": {answer(422, ""), 1}, "409": {answer(409, "sold out"), 1}, "500": {answer(500, ""), 1}, "400": {answer(400, ""), 1}, "200": {answer(200, ""), 1},
			"accepted, in progress": {answer(202, `{"type":"x#in-progress"}`, "Content-Type", "application/problem+json", "Retry-After", "1"), 2},
			"accepted":              {answer(202, `{"type":"x#in-progress"}`, "Content-Type", "application/json", "Retry-After", "1"), 1},
			"unknown":               {answer(409, `{"type":"x#outcome-unknown"}`, "Content-Type", "application/problem+json", "Retry-After", "1"), 1},
			"replayed conflict":     {answer(409, "", "Retry-After", "1", "Idempotency-Replayed", "true"), 1},
			"asks for too much":     {answer(503, "", "Retry-After", "3600"), 1},
		} {
			s := &script{answers: []*http.Response{c.first, answer(201, "")}}
			if _, err := send(t, s, strings.NewReader("x")); err != nil || len(s.keys) != c.sent {
				t.Errorf("%s: sent %d times, want %d: %v", name, len(s.keys), c.sent, err)
			}
		}
	})
}

func TestTransport_Waits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{answers: []*http.Response{inProgress(), answer(503, ""), answer(201, "")}}
		if _, err := send(t, s, nil); err != nil {
			t.Error(err)
		}
		if pause := s.times[1].Sub(s.times[0]); pause != 5*time.Second {
			t.Errorf("Retry-After of 5 s: waited %v", pause)
		}
		if pause := s.times[2].Sub(s.times[1]); pause < 2*time.Second || pause > 2500*time.Millisecond {
			t.Errorf("without Retry-After: waited %v", pause)
		}
		s = &script{answers: []*http.Response{answer(503, "", "Retry-After", time.Now().Add(7*time.Second).UTC().Format(http.TimeFormat)), answer(201, "")}}
		if _, err := send(t, s, nil); err != nil {
			t.Error(err)
		}
		if pause := s.times[1].Sub(s.times[0]); pause < 6*time.Second || pause > 7*time.Second {
			t.Errorf("Retry-After as a date: waited %v", pause)
		}
	})
}

func TestTransport_GivesTheLastAnswerUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{answers: []*http.Response{inProgress(), inProgress(), inProgress()}}
		response, err := send(t, s, nil)
		if err != nil || response.StatusCode != http.StatusConflict || len(s.keys) != 3 {
			t.Fatalf("%v %v", response, err)
		}
		if text, _ := io.ReadAll(response.Body); !strings.Contains(string(text), "in-progress") {
			t.Errorf("body %q", text)
		}
		s = &script{answers: []*http.Response{nil}}
		if _, err := send(t, s, nil); !errors.Is(err, errReset) || len(s.keys) != 3 {
			t.Errorf("%d attempts, %v", len(s.keys), err)
		}
	})
}

func TestTransport_Keys(t *testing.T) {
	t.Parallel()
	s := &script{t: t, answers: []*http.Response{answer(200, "")}}
	transport, err := client.New(s, client.Config{})
	if err != nil {
		t.Fatal(err)
	}
	c := &http.Client{Transport: transport}
	post := func(ctx context.Context, method, header string) string {
		r, err := http.NewRequestWithContext(ctx, method, "http://shop.example", nil)
		if err != nil {
			t.Fatal(err)
		}
		if header != "" {
			r.Header.Set("Idempotency-Key", header)
		}
		response, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		return s.keys[len(s.keys)-1]
	}
	if a, b := post(t.Context(), "POST", ""), post(t.Context(), "POST", ""); a == b || len(a) != 38 {
		t.Errorf("keys %s and %s", a, b)
	}
	if key := post(client.WithKey(t.Context(), `a"b`), "PUT", ""); key != `"a\"b"` {
		t.Errorf("own key: %s", key)
	}
	if key := post(client.WithKey(t.Context(), "a"), "POST", "b"); key != "b" {
		t.Errorf("header: %s", key)
	}
	if key := post(t.Context(), "GET", ""); key != "" {
		t.Errorf("GET: %s", key)
	}
	derived, again := client.DeriveKey("pay", "7"), client.DeriveKey("pay", "7")
	if derived != again || client.DeriveKey("pay", "7") == client.DeriveKey("pay7") || client.DeriveKey("a", "b") == client.DeriveKey("ab", "") {
		t.Error("derived keys")
	}
	for _, most := range []int64{-1, math.MaxInt64} {
		cfg := client.Config{Methods: []string{"post"}, Attempts: -1, Pause: -1, MaxBody: most}
		if _, err := client.New(nil, cfg); err == nil || strings.Count(err.Error(), "client.") != 5 {
			t.Errorf("bad values: %v", err)
		}
	}
}

// The connection breaks after the server has done its work.
func TestTransport_SurvivesBrokenConnections(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) < 3 {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Idempotency-Replayed", "true")
		_, _ = io.Copy(w, r.Body)
	}))
	defer server.Close()
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	transport, err := client.New(base, client.Config{Pause: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	response, err := (&http.Client{Transport: transport}).Post(server.URL, "text/plain", strings.NewReader("order"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, _ := io.ReadAll(response.Body); string(text) != "order" || !client.Replayed(response) {
		t.Errorf("got %q", text)
	}
}
