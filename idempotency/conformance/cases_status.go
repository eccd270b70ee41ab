package conformance

import (
	"encoding/json"
	"net/http"
	"strings"
)

// statusCases returns the cases for the URL that answers about a key in progress name as
// status_url.
func statusCases() []Case {
	return []Case{
		{Name: "the status URL returns the state of a key", test: inFlight(func(x *session, _ int, m message) {
			address := x.statusURL(m)
			x.expectState(address, nil, "started")
			x.release()
			x.settle(m)
			x.expectState(address, nil, "completed")
		})},
		{Name: "the status URL is for its caller only", test: inFlight(func(x *session, _ int, m message) {
			address := x.statusURL(m)
			others := []http.Header{{"X-Tenant": {"another"}}, {"X-User": {"another"}}}
			for _, state := range []string{"started", "completed"} {
				for _, other := range others {
					status, body := x.status(address, other)
					x.check(status == http.StatusNotFound && !strings.Contains(body, state), "%v sees status %d: %s", other, status, body)
				}
				x.expectState(address, nil, state)
				x.release()
				x.settle(m)
			}
		})},
		{Name: "the status URL shows whether a key may run again", test: func(x *session) {
			m := message{plan: once(Plan{Hold: true, Status: http.StatusInternalServerError})}
			wait := x.start(m)
			defer wait()
			x.awaitHeld()
			defer x.release()
			address := x.statusURL(m)
			x.release()
			wait()
			if !x.capabilities.FailuresUnknown {
				status, body := x.status(address, nil)
				x.check(status == http.StatusNotFound && strings.Contains(body, "absent"), "a key whose run had no effect has status %d: %s", status, body)
				return
			}
			x.expectProblem(x.settle(m), http.StatusConflict, "outcome-unknown")
			x.expectState(address, nil, "interrupted")
		}},
		{Name: "a status URL that an answer names works", operation: true, test: func(x *session) {
			for range bursts {
				x.next()
				m := message{plan: once(Plan{})}
				replies, wait := x.burst(m)
				wait()
				x.settle(m)
				for range copies {
					r := <-replies
					if address := r.statusURL(); r.err == nil && address != "" {
						x.expectState(address, nil, "completed")
						return
					}
				}
			}
			panic(skipped("no copy of a request was answered with a status URL"))
		}},
	}
}

// statusURL returns the URL that the answer to a copy of a running request names.
func (x *session) statusURL(m message) string {
	r := x.send(m)
	address := r.statusURL()
	if address == "" {
		x.check(x.inProgress(r), "status %d: %s", r.status, r.body)
		panic(skipped("the service names no status URL"))
	}
	return address
}

func (r *reply) statusURL() string {
	var p struct {
		URL string `json:"status_url"`
	}
	if !r.isProblem() || json.Unmarshal(r.body, &p) != nil {
		return ""
	}
	return p.URL
}

// status requests a status URL as the caller that header names.
func (x *session) status(address string, header http.Header) (int, string) {
	if strings.HasPrefix(address, "/") {
		address = x.target.URLs[0] + address
	}
	status, body, err := x.fetch(x.ctx, address, header)
	if err != nil {
		x.fail("%v", err)
	}
	return status, string(body)
}

func (x *session) expectState(address string, header http.Header, want string) {
	status, body := x.status(address, header)
	var got struct {
		State string `json:"state"`
	}
	err := json.Unmarshal([]byte(body), &got)
	x.check(status == http.StatusOK && err == nil && got.State == want, "status %d: %s, want state %s", status, body, want)
	x.check(!strings.Contains(body, x.key), "the state contains the key: %s", body)
}
