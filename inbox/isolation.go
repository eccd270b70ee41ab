package inbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/sleep"
)

// isolation decides which messages are handled at the same time, for crash isolation. A
// message whose earlier start has not ended may have crashed its process. It is alone for
// a short time: the others finish first, and no other begins until it has ended or its
// time is over.
//
// The others wait for at most maxWait and isolatedFor together. Then they have as much
// time as they have waited before the next isolated message holds them up, so even many of
// those leave them half of the time. maxWait doubles while handlers take longer, up to the
// time that any may take. A handler that has run for longer, and so does not return, is not
// waited for; an isolated message that runs beside it is not charged.
type isolation struct {
	turn chan struct{} // capacity 1: holds a token while an isolated message has its turn

	mu        sync.Mutex
	running   map[*runner]struct{}
	longest   time.Duration // that any may run
	closed    chan struct{} // nil while others may begin; closed when they may again
	idle      chan struct{} // closed when nobody is waited for; nil while nobody waits for that
	closedAt  time.Time
	openUntil time.Time
	maxWait   time.Duration
}

const (
	firstMaxWait = 500 * time.Millisecond
	isolatedFor  = 2 * time.Second
)

// runner is a message that is being handled beside others.
type runner struct{ since time.Time }

func newIsolation(longest time.Duration) *isolation {
	return &isolation{turn: make(chan struct{}, 1), running: make(map[*runner]struct{}), longest: max(longest, firstMaxWait), maxWait: firstMaxWait}
}

func (i *isolation) enter(ctx context.Context) (*runner, error) {
	for {
		i.mu.Lock()
		closed := i.closed
		if closed == nil {
			g := &runner{time.Now()}
			i.running[g] = struct{}{}
			i.mu.Unlock()
			return g, nil
		}
		i.mu.Unlock()
		select {
		case <-closed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// join adds one that runs already.
func (i *isolation) join(began time.Time) *runner {
	i.mu.Lock()
	defer i.mu.Unlock()
	g := &runner{began}
	i.running[g] = struct{}{}
	return g
}

func (i *isolation) leave(g *runner) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.running, g)
	if i.idle != nil && i.isIdle() {
		close(i.idle)
		i.idle = nil
	}
}

// isIdle reports whether nobody must be waited for. Called with mu held.
func (i *isolation) isIdle() bool {
	for g := range i.running {
		if time.Since(g.since) <= i.longest {
			return false
		}
	}
	return true
}

var errNotAlone = errors.New("inbox: other messages took too long for this one to be handled alone")

// isolate returns when its caller is alone, or beside handlers that do not return. The
// caller calls reopen, and gives the turn back. If the others take too long, the error is
// errNotAlone.
func (i *isolation) isolate(ctx context.Context) (alone bool, err error) {
	select {
	case i.turn <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if err := i.holdUpOthers(ctx); err != nil {
		<-i.turn
		return false, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.running) == 0, nil
}

func (i *isolation) holdUpOthers(ctx context.Context) error {
	i.mu.Lock()
	wait, maxWait := time.Until(i.openUntil), i.maxWait
	i.mu.Unlock()
	if !sleep.For(ctx, wait) {
		return ctx.Err()
	}
	idle := make(chan struct{})
	i.mu.Lock()
	i.closed, i.closedAt = make(chan struct{}), time.Now()
	if i.isIdle() {
		close(idle)
	} else {
		i.idle = idle
	}
	i.mu.Unlock()
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	select {
	case <-idle:
		i.mu.Lock()
		defer i.mu.Unlock()
		i.maxWait = firstMaxWait
		return nil
	case <-ctx.Done():
		i.reopen()
		return ctx.Err()
	case <-timer.C:
		i.reopen()
		i.mu.Lock()
		defer i.mu.Unlock()
		i.maxWait = min(2*i.maxWait, i.longest)
		return errNotAlone
	}
}

// reopen lets others begin again.
func (i *isolation) reopen() {
	i.mu.Lock()
	defer i.mu.Unlock()
	close(i.closed)
	i.closed, i.idle = nil, nil
	i.openUntil = time.Now().Add(time.Since(i.closedAt))
}

// isolate waits until the message may be handled: beside others, or alone if it may have
// crashed a process. Call leave after the attempt.
func (in *Inbox) isolate(ctx context.Context, w *work) (leave func(), err error) {
	if !w.start.Unended {
		g, err := in.isolation.enter(ctx)
		return func() { in.isolation.leave(g) }, err
	}
	alone, err := in.isolation.isolate(ctx)
	if err != nil {
		return nil, err
	}
	if w.start.beside = !alone; w.start.beside && w.start.charged { // since it was alone
		w.start.charged = false
		in.discharge(ctx, w.id)
	}
	ended, released := make(chan struct{}), make(chan struct{})
	began, charged := time.Now(), true
	var beside *runner
	go func() { // leave waits for it
		defer close(released)
		timer := time.NewTimer(isolatedFor)
		defer timer.Stop()
		select {
		case <-ended:
		case <-timer.C:
			// From here on other messages may crash the process, and this one is one of many: the
			// turn passes on, since its handler may never return.
			charged = false
			if alone {
				in.discharge(ctx, w.id)
			}
			beside = in.isolation.join(began)
		}
		in.isolation.reopen()
		<-in.isolation.turn
	}()
	return func() {
		close(ended)
		<-released
		w.start.charged = w.start.charged && charged
		if beside != nil {
			in.isolation.leave(beside)
		}
	}, nil
}

// discharge undoes what charge has counted.
func (in *Inbox) discharge(ctx context.Context, id string) {
	detached, cancel := in.detach(ctx)
	defer cancel()
	_, err := ask(detached, in, func(ctx context.Context) (struct{}, error) { return struct{}{}, in.store.Discharge(ctx, id) })
	if err != nil {
		level, attrs := in.failing.records.Event(slog.LevelWarn, in.textOf(err))
		in.cfg.Logger.Log(ctx, level, "attempt of an isolated message still counted",
			append(attrs, "consumer", in.cfg.Consumer, "topic", in.topicOf(ctx), "message_id", id, "error", in.textOf(err))...)
	}
}
