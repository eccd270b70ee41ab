package conformance

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync/atomic"
	"time"
)

// session is the run of one case.
type session struct {
	*Suite
	ctx  context.Context //nolint:containedctx // it lives as long as the case
	name string          // under which effects are counted
	key  string
	turn atomic.Int64
}

type failure struct{ err error }

func (x *session) fail(format string, args ...any) {
	panic(failure{fmt.Errorf(format, args...)})
}

func (x *session) check(ok bool, format string, args ...any) {
	if !ok {
		x.fail(format, args...)
	}
}

func unique() string { return rand.Text() }

// message is a request to send. send fills in zero fields.
type message struct {
	method  string
	url     int // 1-based; 0: each in turn
	path    string
	query   string
	keys    []string // values of the key's header; nil: the session's key
	noKey   bool
	header  http.Header
	body    []byte
	chunked bool
	expect  bool // Expect: 100-continue
	plan    Plan
	ctx     context.Context //nolint:containedctx // of one request
}

// reply is the answer to a message.
type reply struct {
	status   int
	header   http.Header
	trailer  http.Header
	body     []byte
	hints    []int // statuses 1xx
	sentBody bool
	err      error // of the connection
}

func (x *session) request(m message) (*http.Request, *reply) {
	if m.method == "" {
		m.method = http.MethodPost
	}
	if m.path == "" {
		m.path = "/orders"
	}
	contentType := "application/json"
	if x.target.Plain != nil {
		m.path = x.target.Plain.Path
		if m.body == nil {
			m.body = x.target.Plain.Body
		}
		if x.target.Plain.ContentType != "" {
			contentType = x.target.Plain.ContentType
		}
	} else {
		m.path = "/probe" + m.path
		if m.body == nil {
			m.body = []byte(`{"order": 1}`)
		}
	}
	if m.url == 0 {
		m.url = int(x.turn.Add(1)-1)%len(x.target.URLs) + 1
	}
	address := x.target.URLs[m.url-1] + m.path
	if m.query != "" {
		address += "?" + m.query
	}
	r := &reply{}
	ctx := x.ctx
	if m.ctx != nil {
		ctx = m.ctx
	}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(status int, _ textproto.MIMEHeader) error {
			r.hints = append(r.hints, status)
			return nil
		},
	})
	var body io.Reader = bytes.NewReader(m.body)
	if m.chunked {
		body = io.MultiReader(body) // of unknown length
	}
	request, err := http.NewRequestWithContext(ctx, m.method, address, &watched{Reader: body, read: &r.sentBody})
	if err != nil {
		x.fail("%v", err)
	}
	if !m.chunked {
		request.ContentLength = int64(len(m.body))
	}
	maps.Copy(request.Header, x.target.Header)
	request.Header.Set("Content-Type", contentType)
	if x.target.Plain == nil {
		m.plan.Name = x.name
		plan, err := json.Marshal(m.plan)
		if err != nil {
			x.fail("%v", err)
		}
		request.Header.Set("Probe-Plan", string(plan))
	}
	if m.expect {
		request.Header.Set("Expect", "100-continue")
	}
	switch {
	case m.noKey:
	case m.keys == nil:
		request.Header.Set(x.target.KeyHeader, x.key)
	default:
		request.Header[textproto.CanonicalMIMEHeaderKey(x.target.KeyHeader)] = m.keys
	}
	maps.Copy(request.Header, m.header)
	return request, r
}

type watched struct {
	io.Reader
	read *bool
}

func (w *watched) Read(p []byte) (int, error) {
	*w.read = true
	return w.Reader.Read(p)
}

// try sends m, and returns a connection error in the reply.
func (x *session) try(m message) *reply {
	request, r := x.request(m)
	response, err := x.http.Do(request)
	if err != nil {
		r.err = err
		return r
	}
	r.body, r.err = io.ReadAll(response.Body)
	_ = response.Body.Close() // what was read is what counts
	r.status, r.header, r.trailer = response.StatusCode, response.Header, response.Trailer
	return r
}

// send sends m; a connection error fails the case.
func (x *session) send(m message) *reply {
	r := x.try(m)
	if r.err != nil {
		x.fail("no answer: %v", r.err)
	}
	return r
}

// settle sends until the answer is neither "in progress" nor a failure that asks for a
// retry.
func (x *session) settle(m message) *reply {
	for {
		r := x.try(m)
		if r.err == nil && r.status != http.StatusServiceUnavailable && !r.inProgress() {
			return r
		}
		x.pause()
	}
}

func (x *session) pause() { x.wait(10 * time.Millisecond) }

func (x *session) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-x.ctx.Done():
		x.fail("it did not end: %v", x.ctx.Err())
	}
}

func (r *reply) problem() string {
	var p struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(r.body, &p) != nil {
		return ""
	}
	return p.Type[strings.LastIndexByte(p.Type, '#')+1:]
}

func (r *reply) isProblem() bool {
	return strings.HasPrefix(r.header.Get("Content-Type"), "application/problem+json")
}

// inProgress also recognizes foreign services: a conflict that asks for a retry.
func (r *reply) inProgress() bool {
	if r.isProblem() && strings.Contains(r.problem(), "in-progress") {
		return true
	}
	return (r.status == http.StatusConflict || r.status == http.StatusTooEarly) && r.header.Get("Retry-After") != "" && r.header.Get("Idempotency-Replayed") == ""
}

// counts returns the effects and messages of the case.
func (x *session) counts() Counts {
	var c Counts
	if err := x.get(x.ctx, x.target.URLs[0]+"/effects/"+x.name, &c); err != nil {
		x.fail("%v", err)
	}
	return c
}

func (x *session) expectEffects(effects, messages int) {
	if x.target.Plain != nil {
		return
	}
	if got := x.counts(); got != (Counts{effects, messages}) {
		x.fail("%d effects and %d messages, want %d and %d", got.Effects, got.Messages, effects, messages)
	}
}

// held returns how many handlers of this case have been held.
func (x *session) held() (total int) {
	for _, address := range x.target.URLs {
		n := 0
		if err := x.get(x.ctx, address+"/held/"+x.name, &n); err != nil {
			x.fail("%v", err)
		}
		total += n
	}
	return total
}

// awaitHeld waits until a handler of this case is held, and returns where.
func (x *session) awaitHeld() int {
	for {
		for i, address := range x.target.URLs {
			n := 0
			if err := x.get(x.ctx, address+"/held/"+x.name, &n); err != nil {
				x.fail("%v", err)
			}
			if n > 0 {
				return i + 1
			}
		}
		x.pause()
	}
}

func (x *session) release() {
	for _, address := range x.target.URLs {
		request, err := http.NewRequestWithContext(x.ctx, http.MethodPost, address+"/release/"+x.name, nil)
		if err != nil {
			x.fail("%v", err)
		}
		response, err := x.http.Do(request)
		if err != nil {
			x.fail("release: %v", err)
		}
		_ = response.Body.Close() // it is empty
	}
}

// expectReplay checks that again is a replay of first.
func (x *session) expectReplay(first, again *reply) {
	x.check(again.status == first.status, "the replay has status %d, the first answer %d: %s", again.status, first.status, again.body)
	x.check(bytes.Equal(again.body, first.body), "the replay's body differs: %d bytes %.80q, first %d bytes %.80q", len(again.body), again.body, len(first.body), first.body)
	x.check(first.header.Get("Idempotency-Replayed") == "", "the first answer is marked as a replay")
	if x.target.Plain == nil {
		x.check(again.header.Get("Idempotency-Replayed") == "true", "the replay is not marked")
	}
	for _, name := range []string{"Location", "Content-Type", "Etag", "Cache-Control"} {
		x.check(again.header.Get(name) == first.header.Get(name), "the replay has %s %q, the first answer %q", name, again.header.Get(name), first.header.Get(name))
	}
}

// expectProblem checks an answer that is not the handler's. A foreign service may have its
// own problem types.
func (x *session) expectProblem(r *reply, status int, kind string) {
	x.check(r.status == status, "status %d, want %d: %s", r.status, status, r.body)
	if x.target.Plain != nil {
		return
	}
	x.check(r.isProblem(), "content type %q", r.header.Get("Content-Type"))
	x.check(r.problem() == kind, "problem %q, want %q", r.problem(), kind)
}
