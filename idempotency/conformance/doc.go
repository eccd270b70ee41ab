// Package conformance is a black-box test of idempotent HTTP services. It tests what a
// client sees of draft-ietf-httpapi-idempotency-key-header and of what oncemill guarantees
// beyond it. It runs against any URL:
//
//	oncemill conformance --url http://127.0.0.1:8080
//	oncemill conformance --url http://127.0.0.1:8080 --path /orders --body order.json --other other.json
//
// The first form needs a [Probe] at the URL: a small service, which any application can
// mount in front of its own middleware, whose handler does what a request specifies. With
// it all cases run. The second form sends real requests of an [Operation] of any service;
// the cases that need no probe run, as far as the operation has what they need.
//
// Several URLs are several processes on one store; requests are spread over them. What the
// suite cannot do over HTTP, such as killing a process or letting answers expire, [Hooks] do:
//
//	target.Hooks.Kill = func(context.Context) error { return cmd.Process.Kill() }
//	target.Hooks.Start = func(context.Context) error { return start() }
package conformance
