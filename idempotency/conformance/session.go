package conformance

import (
	"bytes"
	"cmp"
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
	"sync"
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

	pending  atomic.Int64 // requests of start and burst that are not answered
	timedOut atomic.Bool  // whether one of them was answered with 503

	mu   sync.Mutex
	used map[int]bool // fills of an operation's requests whose effects count
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
	ctx     context.Context //nolint:containedctx // of one request; it has no time limit then
	sent    func()          // called when the whole request has been sent
	gate    *gate           // holds the body back

	// An operation's requests with the same fill have the same Values. Effects of those that
	// are uncounted do not count in expectEffects.
	fill      int
	uncounted bool
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
	var header http.Header
	if x.target.Operation != nil {
		m, header = x.operation(m)
	} else {
		m, header = x.probe(m)
	}
	if m.url == 0 {
		m.url = int(x.turn.Add(1)-1)%len(x.target.URLs) + 1
	}
	address := x.target.URLs[m.url-1] + m.path
	r := &reply{}
	ctx := httptrace.WithClientTrace(m.ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(status int, _ textproto.MIMEHeader) error {
			r.hints = append(r.hints, status)
			return nil
		},
		WroteRequest: func(httptrace.WroteRequestInfo) {
			if m.sent != nil {
				m.sent()
			}
		},
	})
	var body io.Reader = bytes.NewReader(m.body)
	if m.chunked {
		body = io.MultiReader(body) // of unknown length
	}
	body = &watched{Reader: body, read: &r.sentBody, gate: m.gate, ctx: ctx}
	if len(m.body) == 0 && !m.chunked {
		body, m.expect = http.NoBody, false
	}
	request, err := http.NewRequestWithContext(ctx, m.method, address, body)
	if err != nil {
		x.fail("%v", err)
	}
	if !m.chunked {
		request.ContentLength = int64(len(m.body))
	}
	request.Header = header
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

// probe completes a message to one for a probe.
func (x *session) probe(m message) (message, http.Header) {
	m.method = cmp.Or(m.method, http.MethodPost)
	m.path = "/probe" + cmp.Or(m.path, "/orders")
	if m.query != "" {
		m.path += "?" + m.query
	}
	if m.body == nil {
		m.body = []byte(`{"order": 1}`)
	}
	m.plan.Name = x.name
	plan, err := json.Marshal(m.plan)
	if err != nil {
		x.fail("%v", err)
	}
	header := x.target.Header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", "application/json")
	header.Set("Probe-Plan", string(plan))
	return m, header
}

// watched is a body that reports whether it was asked for.
type watched struct {
	io.Reader
	read *bool
	gate *gate
	ctx  context.Context //nolint:containedctx // of the request
}

func (w *watched) Read(p []byte) (int, error) {
	if w.gate != nil && !*w.read {
		w.gate.pass(w.ctx)
	}
	*w.read = true
	return w.Reader.Read(p)
}

// try sends m, and returns a connection error in the reply. What the service could not register
// has not run: it is sent again, so that a busy machine fails no case.
func (x *session) try(m message) *reply {
	if m.ctx == nil {
		ctx, cancel := context.WithTimeout(x.ctx, x.target.Patience)
		defer cancel()
		m.ctx = ctx
	}
	r := x.once(m)
	for r.problem() == "store-unavailable" {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-m.ctx.Done(): // no reason to end the case: others may run try in goroutines of theirs
			return r
		}
		again := x.once(m)
		if again.err != nil && m.ctx.Err() != nil {
			break // the refusal tells more
		}
		r = again
	}
	return r
}

func (x *session) once(m message) *reply {
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
	r, timedOut := x.repeat(m, x.try)
	x.skipIf(timedOut && r.problem() == "outcome-unknown")
	return r
}

// repeat is settle, or run where a connection error is none to repeat after. It also returns
// whether an answer was 503: then the service may have run out of time in a handler, whose
// outcome it may not know.
func (x *session) repeat(m message, send func(message) *reply) (r *reply, timedOut bool) {
	x.until("an answer", func() bool {
		r = send(m)
		timedOut = timedOut || r.status == http.StatusServiceUnavailable
		return r.err == nil && !x.later(r)
	})
	return r, timedOut
}

// skipIf skips the case, which needs a request that is answered in time.
func (x *session) skipIf(timedOut bool) {
	if timedOut {
		panic(skipped("the service ran out of time for a request: the machine is busy"))
	}
}

// later reports whether r asks for a retry.
func (x *session) later(r *reply) bool {
	switch r.status {
	case http.StatusServiceUnavailable:
		return true
	case http.StatusTooManyRequests:
		return x.target.Operation != nil && r.header.Get("Retry-After") != "" // its limit of requests
	}
	return x.inProgress(r)
}

// run sends m as the first request of its key, which has to succeed.
func (x *session) run(m message) *reply {
	r, timedOut := x.repeat(m, x.send)
	x.skipIf(timedOut && (r.problem() == "outcome-unknown" || x.marked(r)))
	x.check(r.status < http.StatusBadRequest, "status %d: %s", r.status, r.body)
	x.check(!x.marked(r), "the first answer is marked as a replay")
	return r
}

// until calls done until it returns true, for as long as the target's Patience.
func (x *session) until(what string, done func() bool) {
	for end := time.Now().Add(x.target.Patience); !done(); x.pause() {
		if time.Now().After(end) {
			x.fail("waited %s for %s", x.target.Patience, what)
		}
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
func (x *session) inProgress(r *reply) bool {
	if r.isProblem() && strings.Contains(r.problem(), "in-progress") {
		return true
	}
	return (r.status == http.StatusConflict || r.status == http.StatusTooEarly) && r.header.Get("Retry-After") != "" && !x.marked(r)
}

// marked reports whether the service says that r is a replay.
func (x *session) marked(r *reply) bool { return r.header.Get(x.target.ReplayedHeader) != "" }

// counts returns the effects and messages of the case.
func (x *session) counts() Counts {
	var c Counts
	if err := x.get(x.ctx, x.target.URLs[0]+"/effects/"+x.name, &c); err != nil {
		x.fail("%v", err)
	}
	return c
}

// expectEffects checks how many effects and messages there are. The messages of an operation
// are unknown, and its effects too, unless a hook counts them.
func (x *session) expectEffects(effects, messages int) {
	if x.target.Operation == nil {
		if got := x.counts(); got != (Counts{effects, messages}) {
			x.fail("%d effects and %d messages, want %d and %d", got.Effects, got.Messages, effects, messages)
		}
		return
	}
	if got, known := x.effects(); known {
		x.check(got == effects, "%d effects, want %d", got, effects)
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
func (x *session) awaitHeld() (at int) {
	x.until("a handler that holds its request", func() bool {
		pending := x.pending.Load()
		for i, address := range x.target.URLs {
			n := 0
			if err := x.get(x.ctx, address+"/held/"+x.name, &n); err != nil {
				x.fail("%v", err)
			}
			if n > 0 {
				at = i + 1
				return true
			}
		}
		x.skipIf(pending == 0 && x.timedOut.Load())
		x.check(pending > 0, "the request was answered before its handler was held")
		return false
	})
	return at
}

// tracked is try, for awaitHeld.
func (x *session) tracked(m message) *reply {
	defer x.pending.Add(-1)
	r := x.try(m)
	if r.status == http.StatusServiceUnavailable {
		x.timedOut.Store(true)
	}
	return r
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

// kept are headers of an answer that a replay has to repeat.
var kept = []string{"Location", "Content-Type", "Etag", "Cache-Control", "Content-Language", "Content-Encoding", "Last-Modified", "Link"}

// expectReplay checks that again is a replay of first.
func (x *session) expectReplay(first, again *reply) {
	x.check(again.status == first.status, "the replay has status %d, the first answer %d: %s", again.status, first.status, again.body)
	x.check(bytes.Equal(again.body, first.body), "the replay's body differs: %d bytes %.80q, first %d bytes %.80q", len(again.body), again.body, len(first.body), first.body)
	x.check(!x.marked(first), "the first answer is marked as a replay")
	if x.target.Operation == nil {
		x.check(again.header.Get(x.target.ReplayedHeader) == "true", "the replay is not marked")
	}
	for _, name := range kept {
		x.check(again.header.Get(name) == first.header.Get(name), "the replay has %s %q, the first answer %q", name, again.header.Get(name), first.header.Get(name))
	}
}

// expectOwn checks that r, of another request than first, is an answer of its own and no
// replay.
func (x *session) expectOwn(first, r *reply) {
	x.check(r.status < http.StatusBadRequest, "another request is answered with %d: %s", r.status, r.body)
	x.check(!x.marked(r), "another request gets a replay")
	if r.status != first.status || !bytes.Equal(r.body, first.body) || r.header.Get("Location") != first.header.Get("Location") {
		return
	}
	x.check(x.target.Operation != nil, "another request gets the answer %.80q to the first", r.body)
	if !x.marksReplays() {
		panic(skipped("needs answers that differ from request to request, or a header that marks replays (Target.ReplayedHeader, --replayed-header)"))
	}
}

// expectRefused checks that r refuses a request that differs from the first one of its key.
// A foreign service may do so with 409.
func (x *session) expectRefused(r *reply) {
	if x.target.Operation == nil {
		x.expectProblem(r, http.StatusUnprocessableEntity, "key-reused")
		return
	}
	x.check(r.status == http.StatusUnprocessableEntity || r.status == http.StatusConflict && !x.marked(r), "status %d: %s", r.status, r.body)
}

// expectProblem checks an answer that is not the handler's. A foreign service may have its
// own problem types.
func (x *session) expectProblem(r *reply, status int, kind string) {
	x.check(r.status == status, "status %d, want %d: %s", r.status, status, r.body)
	if x.target.Operation != nil {
		return
	}
	x.check(r.isProblem(), "content type %q", r.header.Get("Content-Type"))
	x.check(r.problem() == kind, "problem %q, want %q", r.problem(), kind)
}
