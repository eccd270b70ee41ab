package conformance

import (
	"bytes"
	"net/http"
)

// callerCases returns the cases for requests of several callers with one key.
func callerCases() []Case {
	return []Case{
		{Name: "two tenants share no key", operation: true, given: func(o *Operation) string {
			if o.Tenant == nil {
				return "another tenant (Operation.Tenant, --tenant)"
			}
			return ""
		}, test: func(x *session) {
			caller := &Caller{Header: http.Header{"X-Tenant": {"b"}}}
			if x.target.Operation != nil {
				caller = x.target.Operation.Tenant
			}
			x.separate(caller)
		}},
		{Name: "two users share no key", operation: true, given: func(o *Operation) string {
			if o.User == nil {
				return "another user (Operation.User, --user)"
			}
			return ""
		}, test: func(x *session) {
			caller := &Caller{Header: http.Header{"X-User": {"b"}}}
			if x.target.Operation != nil {
				caller = x.target.Operation.User
			}
			x.separate(caller)
		}},
		{Name: "tenant and user are not a concatenation", test: func(x *session) {
			one := &Caller{Header: http.Header{"X-Tenant": {"ab"}, "X-User": {"c"}}}
			two := &Caller{Header: http.Header{"X-Tenant": {"a"}, "X-User": {"bc"}}}
			first := x.run(message{}.planned("first").as(one))
			x.expectOwn(first, x.settle(message{}.planned("second").as(two)))
			x.expectEffects(2, 2)
		}},
	}
}

// separate checks that the key of this caller is another one of another caller: a request
// with other contents runs there, and each caller gets replays of its own answer. Other
// contents also show a key that is shared and refuses them.
func (x *session) separate(caller *Caller) {
	mine := message{}.planned("first")
	theirs := message{fill: 1}.planned("second").as(caller)
	if o := x.target.Operation; o == nil {
		theirs.body = []byte(`{"order": 2}`)
	} else if len(o.Other) > 0 && !bytes.Contains(o.Body, []byte("{{")) {
		theirs.body = o.Other
	}
	first := x.run(mine)
	second := x.settle(theirs)
	x.expectOwn(first, second)
	x.expectReplay(second, x.settle(theirs))
	x.expectReplay(first, x.settle(mine))
	x.expectEffects(2, 2)
}
