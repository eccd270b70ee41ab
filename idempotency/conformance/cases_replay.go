package conformance

import (
	"bytes"
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"time"
)

// once adds one effect and one message to a plan.
func once(p Plan) Plan {
	p.Effects, p.Messages = 1, 1
	return p
}

// replayed sends twice and checks the replay. Then there must be one effect, unless the
// status means that there is none.
func replayed(p Plan) func(*session) {
	return func(x *session) {
		var first *reply
		if x.target.Operation != nil {
			first = x.run(message{})
		} else {
			first = x.send(message{plan: once(p)})
			want := cmp.Or(p.Status, http.StatusCreated)
			x.check(first.status == want, "status %d, want %d: %s", first.status, want, first.body)
		}
		x.expectReplay(first, x.settle(message{plan: once(p)}))
		x.expectReplay(first, x.settle(message{plan: once(p)}))
		switch {
		case first.status < http.StatusBadRequest:
			x.expectEffects(1, 1)
		case x.capabilities.Transactional:
			x.expectEffects(0, 0)
		default:
			x.expectEffects(1, 1)
		}
	}
}

// rerun sends twice and expects the status both times without a replay. Then a request
// with another plan must succeed.
func rerun(status int) func(*session) {
	return func(x *session) {
		for range 2 {
			r := x.send(message{plan: once(Plan{Status: status})})
			x.check(r.status == status, "status %d, want %d", r.status, status)
			x.check(!x.marked(r), "it was replayed")
		}
		before := x.counts()
		r := x.send(message{plan: once(Plan{})})
		x.check(r.status == http.StatusCreated, "status %d after the cause has gone: %s", r.status, r.body)
		after := x.counts()
		x.check(after.Effects == before.Effects+1, "%d effects, then %d", before.Effects, after.Effects)
		if x.capabilities.Transactional {
			x.expectEffects(1, 1)
		}
	}
}

func replayCases() []Case {
	cases := []Case{
		{Name: "an answer is replayed", operation: true, test: replayed(Plan{Body: []byte("made"), Header: map[string][]string{"Location": {"/orders/7"}}})},
	}
	for _, status := range []int{200, 201, 202, 303, 400, 404, 409, 410, 412, 422} {
		p := Plan{Status: status, Body: fmt.Appendf(nil, `{"status": %d}`, status), Header: map[string][]string{"Location": {"/orders/7"}, "Content-Type": {"application/json"}}}
		cases = append(cases, Case{Name: fmt.Sprintf("%d is replayed with its body and Location", status), test: replayed(p)})
	}
	cases = append(cases, Case{Name: "204 is replayed without a body", test: replayed(Plan{Status: 204})})
	for _, status := range []int{401, 403, 429} {
		cases = append(cases, Case{Name: fmt.Sprintf("%d is not stored: the request runs again", status), test: rerun(status)})
	}
	for _, status := range []int{500, 502, 503} {
		cases = append(cases, Case{Name: fmt.Sprintf("%d is not stored: nothing has happened, or its outcome is unknown", status), test: func(x *session) {
			if x.capabilities.FailuresUnknown {
				r := x.send(message{plan: once(Plan{Status: status})})
				x.check(r.status == status, "status %d, want %d", r.status, status)
				x.expectUnknown()
				return
			}
			rerun(status)(x)
		}})
	}
	binary := make([]byte, 256)
	for i := range binary {
		binary[i] = byte(i)
	}
	header := func(name string, values ...string) map[string][]string { return map[string][]string{name: values} }
	return append(
		cases,
		Case{Name: "a binary body is replayed as it is", test: replayed(Plan{Body: binary, Header: header("Content-Type", "application/octet-stream")})},
		Case{Name: "an empty body is replayed", test: replayed(Plan{})},
		Case{Name: "a body of 100 KB is replayed", test: replayed(Plan{Size: 100_000})},
		Case{Name: "a body as large as may be stored is replayed", test: func(x *session) { replayed(Plan{Size: x.capabilities.MaxResponse})(x) }},
		Case{Name: "PUT is replayed", test: replayedBy(http.MethodPut)},
		Case{Name: "PATCH is replayed", test: replayedBy(http.MethodPatch)},
		Case{Name: "a header with several values is replayed in order", test: func(x *session) {
			m := message{plan: once(Plan{Header: header("X-Many", "b", "a", "c")})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(slices.Equal(again.header.Values("X-Many"), []string{"b", "a", "c"}), "got %q", again.header.Values("X-Many"))
		}},
		Case{Name: "ETag, Cache-Control and headers of the service's own are replayed", test: func(x *session) {
			want := map[string][]string{
				"Etag": {`"7"`}, "Cache-Control": {"private, max-age=5"}, "Content-Language": {"de"}, "Content-Encoding": {"x-test"},
				"Last-Modified": {"Mon, 01 Jan 2001 00:00:00 GMT"}, "Link": {"</orders>; rel=up"}, "X-Total": {"1"}, "Retry-Count": {"0"},
			}
			m := message{plan: once(Plan{Header: want, Body: []byte{0x1f, 0x8b, 0xff}})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			for name, values := range want {
				x.check(slices.Equal(again.header.Values(name), values), "%s is %q", name, again.header.Values(name))
			}
		}},
		Case{Name: "an answer is still there after some seconds", operation: true, test: func(x *session) {
			m := message{plan: once(Plan{Body: []byte("kept")})}
			first := x.run(m)
			x.wait(3 * time.Second)
			x.expectReplay(first, x.settle(m))
			x.expectEffects(1, 1)
		}},
		Case{Name: "an answer is still there after 300 others", operation: true, test: func(x *session) {
			m := message{plan: once(Plan{Body: []byte("first")})}
			first := x.run(m)
			for i := range 300 {
				x.run(message{keys: []string{unique()}, fill: i + 1, uncounted: true, plan: Plan{Size: 1000}})
			}
			x.expectReplay(first, x.settle(m))
			x.expectEffects(1, 1)
		}},
		Case{Name: "Set-Cookie is not replayed", test: func(x *session) {
			m := message{plan: once(Plan{Header: header("Set-Cookie", "session=secret")})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(first.header.Get("Set-Cookie") != "", "the first answer has lost it")
			x.check(again.header.Get("Set-Cookie") == "", "got %q", again.header.Get("Set-Cookie"))
		}},
		Case{Name: "Date is that of the replay", test: func(x *session) {
			m := message{plan: once(Plan{Header: header("Date", "Mon, 01 Jan 2001 00:00:00 GMT")})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(again.header.Get("Date") != "" && again.header.Get("Date") != first.header.Get("Date"), "got %q", again.header.Get("Date"))
		}},
		Case{Name: "headers about the connection are not replayed", test: func(x *session) {
			m := message{plan: once(Plan{Header: map[string][]string{"Keep-Alive": {"timeout=5"}, "Proxy-Authenticate": {"Basic"}}})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(again.header.Get("Keep-Alive") == "" && again.header.Get("Proxy-Authenticate") == "", "got %v", again.header)
		}},
		Case{Name: "headers that are set outside are not doubled", test: func(x *session) {
			m := message{plan: once(Plan{Add: header("Vary", "Accept")})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			for _, r := range []*reply{first, again} {
				x.check(len(r.header.Values("Access-Control-Allow-Origin")) == 1, "got %q", r.header.Values("Access-Control-Allow-Origin"))
				x.check(slices.Equal(r.header.Values("Vary"), []string{"Origin", "Accept"}), "got %q", r.header.Values("Vary"))
			}
		}},
		Case{Name: "a header that the handler replaced stays replaced", test: func(x *session) {
			m := message{plan: once(Plan{Header: header("Vary", "Accept")})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(slices.Equal(again.header.Values("Vary"), []string{"Accept"}), "got %q", again.header.Values("Vary"))
		}},
		Case{Name: "trailers are replayed", test: func(x *session) {
			m := message{plan: once(Plan{Body: []byte("x"), Trailer: map[string]string{"X-Sum": "42"}})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(first.trailer.Get("X-Sum") == "42" && again.trailer.Get("X-Sum") == "42", "got %v, then %v", first.trailer, again.trailer)
		}},
		Case{Name: "informational responses pass through", test: func(x *session) {
			m := message{plan: once(Plan{EarlyHints: true})}
			first, again := x.send(m), x.send(m)
			x.expectReplay(first, again)
			x.check(slices.Equal(first.hints, []int{http.StatusEarlyHints}), "got %v", first.hints)
			x.check(first.header.Get("Link") == "", "the hint's header is in the answer")
		}},
		Case{Name: "a handler that flushes gives whole answers", test: func(x *session) {
			m := message{plan: once(Plan{Size: 100_000, Flush: true})}
			first := x.send(m)
			x.check(len(first.body) == 100_000, "%d bytes", len(first.body))
			again := x.send(m)
			if again.status == http.StatusConflict {
				x.expectProblem(again, http.StatusConflict, "response-not-stored")
			} else {
				x.expectReplay(first, again)
			}
			x.expectEffects(1, 1)
		}},
		Case{Name: "ten retries get the same answer and leave one message", operation: true, test: func(x *session) {
			m := message{plan: once(Plan{Body: []byte("same")})}
			first := x.run(m)
			for range 10 {
				x.expectReplay(first, x.settle(m))
			}
			x.expectEffects(1, 1)
		}},
		Case{Name: "a replay does not depend on what the handler would answer now", test: func(x *session) {
			first := x.send(message{plan: once(Plan{Body: []byte("then")})})
			again := x.send(message{plan: once(Plan{Body: []byte("now"), Status: 200})})
			x.expectReplay(first, again)
		}},
		Case{Name: "another process replays", operation: true, two: true, test: func(x *session) {
			first := x.run(message{url: 1, plan: once(Plan{Body: []byte("one")})})
			x.expectReplay(first, x.settle(message{url: 2, plan: once(Plan{})}))
			x.expectEffects(1, 1)
		}},
		Case{Name: "a body that is not read is compared all the same", test: func(x *session) {
			m := message{plan: once(Plan{SkipBody: true}), body: bytes.Repeat([]byte("a"), 10_000)}
			x.expectReplay(x.send(m), x.send(m))
			m.body = bytes.Repeat([]byte("b"), 10_000)
			x.expectProblem(x.send(m), http.StatusUnprocessableEntity, "key-reused")
		}},
	)
}

func replayedBy(method string) func(*session) {
	return func(x *session) {
		m := message{method: method, plan: once(Plan{Body: []byte(method)})}
		x.expectReplay(x.send(m), x.send(m))
		x.expectEffects(1, 1)
	}
}
