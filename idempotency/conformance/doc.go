// Package conformance is a black-box test of idempotent HTTP services. It tests what a
// client sees of draft-ietf-httpapi-idempotency-key-header and of what oncemill guarantees
// beyond it. It runs against any URL:
//
//	oncemill conformance --url http://127.0.0.1:8080
//	oncemill conformance --url http://127.0.0.1:8080 --path /orders --body order.json --other other.json
//
// The first form needs a [Probe] at the URL: a small service, which any application can
// mount in front of its own middleware, whose handler does what a request specifies. With
// it all cases run. The second form sends a real request of a real service, of which only
// two bodies are known; only the cases that need no more than that run.
//
// Several URLs are several processes on one store; requests are spread over them. In a
// test of your own, Target.Processes lets the suite kill, restart, stop and continue them:
//
//	type process struct{ cmd *exec.Cmd }
//
//	func (p *process) Freeze(context.Context) error { return p.cmd.Process.Signal(syscall.SIGSTOP) }
package conformance
