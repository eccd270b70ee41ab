package rabbitmq

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/internal/repeats"
	"github.com/oncemill/oncemill/internal/sleep"
	"github.com/oncemill/oncemill/relay"
)

// running is the state of one Run: the current connection and the lanes.
type running struct {
	settings *settings
	state    atomic.Pointer[state]
	created  *mailbox[*lane] // lanes that Run has not started yet

	mu    sync.Mutex
	lanes map[int]*lane // nil once closed
}

// state is the state of the connection. Lanes are poked when it changes.
type state struct {
	link *link // not nil while connected
	err  error // not nil if the last attempt to connect failed: an unavailable outcome
}

func newRunning(s *settings) *running {
	r := &running{
		settings: s,
		created:  newMailbox[*lane](make(chan struct{}, 1)),
		lanes:    make(map[int]*lane),
	}
	r.state.Store(&state{})
	return r
}

// lane returns the lane with that number, or nil if Run is ending.
func (r *running) lane(number int) *lane {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lanes[number]
	if l == nil && r.lanes != nil {
		l = newLane(r, number)
		r.lanes[number] = l
		r.created.put(l)
	}
	return l
}

// close ends the creation of lanes and returns those that were not started.
func (r *running) close() []*lane {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lanes = nil
	return r.created.close()
}

func (r *running) pokeLanes() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lanes {
		poke(l.wake)
	}
}

func (r *running) enter(s state) {
	r.state.Store(&s)
	r.pokeLanes()
}

// unlessConnected makes waiting messages unavailable if the connection is not there soon: the other
// side may be silent, and until they have an outcome another worker cannot have their lanes.
func (r *running) unlessConnected() *time.Timer {
	awaited := r.state.Load()
	return time.AfterFunc(r.settings.ConfirmTimeout/unheard, func() {
		if r.state.CompareAndSwap(awaited, &state{err: unavailableNoConnection}) {
			r.pokeLanes()
		}
	})
}

// connect keeps a connection, and dials a new one after each loss, until ctx ends.
func (r *running) connect(ctx context.Context, group *sync.WaitGroup) {
	log := r.settings.Logger
	dialer := r.settings.conn.Dialer()
	wait := r.settings.conn.Backoff
	wait.Reset()
	var failures repeats.Series
	var last string // that it was connected to
	overdue := r.unlessConnected()
	defer func() { overdue.Stop() }()
	for {
		link, err := dial(ctx, r, dialer, group)
		if err != nil && ctx.Err() != nil {
			return
		}
		if err != nil {
			// Waiting messages need not wait for their deadlines.
			r.enter(state{err: relay.Unavailable(fmt.Errorf("connect: %w", err))})
			level, attrs := failures.Failed(slog.LevelWarn, err.Error())
			log.Log(ctx, level, "rabbitmq cannot be reached, retrying", append(attrs, "uri", r.settings.conn.Shown(), "error", err)...)
			if !sleep.For(ctx, wait.NextBackOff()) {
				return
			}
			continue
		}
		overdue.Stop()
		attrs, report := failures.Over()
		level := slog.LevelDebug
		if report || link.shown != last {
			level = slog.LevelInfo
		}
		last = link.shown
		log.Log(ctx, level, "rabbitmq connected", append([]any{"uri", link.shown}, attrs...)...)
		since := time.Now()
		r.enter(state{link: link})
		err = link.watch(ctx)
		if ctx.Err() != nil {
			link.close()
			return
		}
		r.enter(state{})
		overdue = r.unlessConnected()
		_ = link.net.Close() // sends what amqp091-go has written; always nil
		level, attrs = failures.Failed(slog.LevelWarn, err.Error())
		log.Log(ctx, level, "rabbitmq connection lost, reconnecting", append(attrs, "uri", link.shown, "error", err)...)
		// A broker that accepts connections only to drop them is still down.
		if time.Since(since) > wait.MaxInterval {
			wait.Reset()
		}
		if !sleep.For(ctx, wait.NextBackOff()) {
			return
		}
	}
}
