package idempotency

import (
	"context"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/oncemill/oncemill"
)

// serving is a handler that runs, with what it answers.
type serving struct {
	*running
	x      *exchange
	rec    *recorder
	cancel context.CancelFunc
}

// start starts the handler with a fresh recorder. Somebody has to wait for it.
func (x *exchange) start(ctx context.Context, tx oncemill.Tx) *serving {
	deadline := x.began.Add(x.cfg.Timeout)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	if tx != nil {
		ctx = oncemill.ContextWithTx(ctx, tx)
	}
	rec := newRecorder(x.w, x.cfg.MaxResponse, x.cfg.DropHeaders)
	rec.stream = x.cfg.AllowStreaming && tx == nil && !x.transactional
	var w http.ResponseWriter = rec
	if rec.stream {
		w = flusher{rec}
	}
	return &serving{invoke(deadline, func() { x.next.ServeHTTP(w, x.request(ctx)) }), x, rec, cancel}
}

// finished returns when the handler has. timedOut: the client has got its 503, and what
// the handler answered is of no interest. renew is called every so often until then,
// unless it is nil.
func (s *serving) finished(every time.Duration, renew func()) (p *panicked, timedOut bool) {
	defer s.cancel()
	late := func() {
		timedOut = true
		s.late()
	}
	p = s.wait(late, every, renew)
	if !timedOut && !time.Now().Before(s.deadline) {
		late() // what it answered, it answered because its context had ended
	}
	return p, timedOut
}

// late answers for a handler whose time is up.
func (s *serving) late() {
	if !s.rec.close() {
		return
	}
	w := s.x.w
	clear(w.Header())
	for name, values := range s.rec.outer {
		w.Header()[name] = values
	}
	w.Header().Set("Connection", "close") // it is busy until the handler returns
	s.x.refuse(ProblemExecutionTimeout)
	_ = http.NewResponseController(w).Flush() // a writer that cannot flush sends it later
}

// panicked is what a handler panicked with. aborted tells that it ended its
// goroutine instead.
type panicked struct {
	value   any
	stack   []byte
	aborted bool
}

// running is a call in a goroutine of its own, which somebody waits for, whatever
// happens: nobody else gets the key while it runs.
type running struct {
	deadline time.Time
	done     chan *panicked // capacity 1
}

func invoke(deadline time.Time, fn func()) *running {
	r := &running{deadline: deadline, done: make(chan *panicked, 1)}
	go func() {
		p := &panicked{aborted: true}
		defer func() {
			if p != nil {
				if v := recover(); v != nil {
					p.value, p.stack, p.aborted = v, debug.Stack(), false
				}
			}
			r.done <- p
		}()
		fn()
		p = nil
	}()
	return r
}

// wait waits until fn has returned. late is called once if it still runs when the
// deadline passes, and renew every so often until it returns, unless it is nil.
func (r *running) wait(late func(), every time.Duration, renew func()) (p *panicked) {
	timer := time.NewTimer(time.Until(r.deadline))
	defer timer.Stop()
	var ticks <-chan time.Time
	if renew != nil {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		ticks = ticker.C
	}
	for {
		select {
		case p := <-r.done:
			return p
		case <-timer.C:
			late()
		case <-ticks:
			renew()
		}
	}
}

// waitFor waits for no longer than patience, and not beyond the deadline.
func (r *running) waitFor(patience time.Duration) (p *panicked, ended bool) {
	timer := time.NewTimer(min(patience, time.Until(r.deadline)))
	defer timer.Stop()
	select {
	case p := <-r.done:
		return p, true
	case <-timer.C:
		return nil, false
	}
}
