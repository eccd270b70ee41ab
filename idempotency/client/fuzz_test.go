package client_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency/client"
)

// answering is a server that always gives the same answer.
type answering struct {
	status                        int
	contentType, retryAfter, body string
	times                         int
}

func (a *answering) RoundTrip(*http.Request) (*http.Response, error) {
	a.times++
	return &http.Response{
		StatusCode: a.status, Header: http.Header{"Content-Type": {a.contentType}, "Retry-After": {a.retryAfter}},
		Body: io.NopCloser(strings.NewReader(a.body)),
	}, nil
}

// Whatever a server answers, the caller gets the whole of it, and nothing is sent again after
// an answer that is final.
func FuzzTransport(f *testing.F) {
	const problem = "application/problem+json"
	f.Add(uint16(201), "application/json", "", `{"id":7}`)
	f.Add(uint16(409), problem, "1", `{"type":"https://example.org/in-progress"}`)
	f.Add(uint16(409), problem, "0", `{"type":7}`)
	f.Add(uint16(202), problem+`; charset="`, "-1", `{"type":"in-progress"`)
	f.Add(uint16(422), problem, "99999999999999999999", `{"type":"mismatch"}`)
	f.Add(uint16(503), "", "Wed, 21 Oct 2015 07:28:00 GMT", "")
	f.Fuzz(func(t *testing.T, status uint16, contentType, retryAfter, body string) {
		server := &answering{status: int(status), contentType: contentType, retryAfter: retryAfter, body: body}
		transport, err := client.New(server, client.Config{Attempts: 2, Pause: time.Millisecond, MaxPause: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://127.0.0.1/orders", strings.NewReader("order"))
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		got, err := io.ReadAll(response.Body)
		if err != nil || string(got) != body {
			t.Errorf("the caller gets %q, %v, want %q", got, err, body)
		}
		switch server.status {
		case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusBadGateway,
			http.StatusServiceUnavailable, http.StatusGatewayTimeout, http.StatusAccepted, http.StatusConflict:
		default:
			if server.times != 1 {
				t.Errorf("sent again after %d", status)
			}
		}
	})
}
