package idempotency

import (
	"context"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/oncemill/oncemill"
)

// attempt is one call of the user's function, with its own state. Its goroutine is always
// waited for: the key is not released while it runs.
type attempt struct {
	state  *current
	tx     *sqlTx // nil where effects are elsewhere
	cancel context.CancelFunc
	done   chan *panicked // capacity 1

	// For a request.
	request *http.Request
	rec     *recorder
	res     *response // see answer

	// For a command.
	result []byte
	err    error

	// Set once the function has returned.
	panicked *panicked
	late     bool // time was up before
}

// panicked is a panic of a function. aborted means that it ended its goroutine instead.
type panicked struct {
	value   any
	stack   []byte
	aborted bool
}

// error returns the error of a command.
func (p *panicked) error() error {
	return &oncemill.PanicError{Value: p.value, Stack: p.stack}
}

// newAttempt returns an attempt that has not begun, and its context, which ends at the
// deadline. tx is nil if effects are elsewhere.
func (in *intent) newAttempt(ctx context.Context, tx *sqlTx) (*attempt, context.Context) {
	a := &attempt{tx: tx, state: &current{id: in.claim.ID, transactional: in.transactional}, done: make(chan *panicked, 1)}
	ctx, a.cancel = context.WithDeadline(ctx, in.deadline)
	ctx = context.WithValue(ctx, runKey{}, a.state)
	if tx != nil {
		ctx = oncemill.ContextWithTx(ctx, tx)
	}
	return a, ctx
}

// begin calls fn in a goroutine of its own.
func (a *attempt) begin(ctx context.Context, fn func()) {
	go func() {
		p := &panicked{aborted: true}
		defer func() {
			if p != nil {
				if v := recover(); v != nil {
					p.value, p.stack, p.aborted = v, debug.Stack(), false
				}
			}
			a.done <- p
		}()
		fn()
		p = nil
		if a.tx != nil {
			a.tx.closeRows(ctx) // before its context ends, which costs the drivers their connection
		}
	}()
}

// wait waits until the function has returned. It calls expire once if the function is
// still running at the deadline, or has returned after it.
func (a *attempt) wait(deadline time.Time, expire func(*attempt)) {
	defer a.cancel()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	for running := true; running; {
		select {
		case a.panicked = <-a.done:
			running = false
		case <-timer.C:
			a.late = true
			expire(a)
		}
	}
	if !a.late && !time.Now().Before(deadline) {
		a.late = true
		expire(a)
	}
}

// waitFor waits no longer than most, and not beyond the deadline.
func (a *attempt) waitFor(most time.Duration, deadline time.Time) (ended bool) {
	timer := time.NewTimer(min(most, time.Until(deadline)))
	defer timer.Stop()
	select {
	case a.panicked = <-a.done:
		a.cancel()
		a.late = !time.Now().Before(deadline)
		return true
	case <-timer.C:
		return false
	}
}

// answer returns the recorded response, once the handler has returned.
func (a *attempt) answer() *response {
	if a.res == nil {
		a.res = a.rec.result()
	}
	return a.res
}

// discard removes the attempt's files.
func (a *attempt) discard() {
	if a == nil {
		return
	}
	if a.rec != nil {
		a.rec.discard()
	}
	if a.request != nil && a.request.MultipartForm != nil {
		_ = a.request.MultipartForm.RemoveAll() // the system removes what is left
	}
}
