package inbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// room limits which messages are handled at the same time, for crash isolation. A suspect
// is alone in it for a short time: the others finish first, and the door stays shut until
// the suspect has left or its time is over.
//
// The others wait for at most the suspect's patience and isolation together. Then they
// have as much time as they have waited before the next suspect shuts the door, so even
// many suspects leave them half of the time. patience doubles while handlers take longer,
// up to the time that any may take. A handler that has been inside for longer, and so does
// not return, is not waited for; a suspect that runs beside it is not charged.
type room struct {
	turn chan struct{} // capacity 1: holds a token while a suspect has its turn

	mu       sync.Mutex
	inside   map[*guest]struct{}
	most     time.Duration // that any may be inside
	door     chan struct{} // nil while it is open; closed when it opens
	empty    chan struct{} // closed when nobody is waited for; nil while no suspect waits for that
	shut     time.Time
	next     time.Time // the door stays open until then
	patience time.Duration
}

const (
	firstPatience = 500 * time.Millisecond
	isolation     = 2 * time.Second
)

// guest is a message inside that is not a suspect.
type guest struct{ since time.Time }

func newRoom(most time.Duration) *room {
	return &room{turn: make(chan struct{}, 1), inside: make(map[*guest]struct{}), most: max(most, firstPatience), patience: firstPatience}
}

func (r *room) enter(ctx context.Context) (*guest, error) {
	for {
		r.mu.Lock()
		door := r.door
		if door == nil {
			g := &guest{time.Now()}
			r.inside[g] = struct{}{}
			r.mu.Unlock()
			return g, nil
		}
		r.mu.Unlock()
		select {
		case <-door:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (r *room) leave(g *guest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inside, g)
	if r.empty != nil && r.clear() {
		close(r.empty)
		r.empty = nil
	}
}

// clear reports whether nobody is inside who must be waited for. Called with mu held.
func (r *room) clear() bool {
	for g := range r.inside {
		if time.Since(g.since) <= r.most {
			return false
		}
	}
	return true
}

var errCrowded = errors.New("inbox: others took too long for a suspect to be alone")

// isolate returns when its caller is alone, or beside handlers that do not return. The
// caller opens the door, and gives the turn back. If the others take too long, the error
// is errCrowded.
func (r *room) isolate(ctx context.Context) (alone bool, err error) {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	if err := r.shutOut(ctx); err != nil {
		<-r.turn
		return false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.inside) == 0, nil
}

func (r *room) shutOut(ctx context.Context) error {
	r.mu.Lock()
	wait, patience := time.Until(r.next), r.patience
	r.mu.Unlock()
	if !pause(ctx, wait) {
		return ctx.Err()
	}
	empty := make(chan struct{})
	r.mu.Lock()
	r.door, r.shut = make(chan struct{}), time.Now()
	if r.clear() {
		close(empty)
	} else {
		r.empty = empty
	}
	r.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-empty:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.patience = firstPatience
		return nil
	case <-ctx.Done():
		r.open()
		return ctx.Err()
	case <-timer.C:
		r.open()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.patience = min(2*r.patience, r.most)
		return errCrowded
	}
}

// open lets the others in again.
func (r *room) open() {
	r.mu.Lock()
	defer r.mu.Unlock()
	close(r.door)
	r.door, r.empty = nil, nil
	r.next = time.Now().Add(time.Since(r.shut))
}

// enterRoom waits until the message may enter; a suspect waits until it is alone. Call
// leave after the attempt.
func (in *Inbox) enterRoom(ctx context.Context, w *work) (leave func(), err error) {
	if !w.start.Unended {
		g, err := in.room.enter(ctx)
		return func() { in.room.leave(g) }, err
	}
	alone, err := in.room.isolate(ctx)
	if err != nil {
		return nil, err
	}
	if w.start.beside = !alone; w.start.beside && w.start.charged { // since it was alone
		w.start.charged = false
		in.discharge(ctx, w.id)
	}
	ended, released := make(chan struct{}), make(chan struct{})
	charged := true
	go func() { // leave waits for it
		defer close(released)
		defer in.room.open()
		timer := time.NewTimer(isolation)
		defer timer.Stop()
		select {
		case <-ended:
		case <-timer.C:
			// From here on other messages may crash the process.
			charged = false
			if alone {
				in.discharge(ctx, w.id)
			}
		}
	}()
	return func() {
		close(ended)
		<-released
		w.start.charged = w.start.charged && charged
		<-in.room.turn
	}, nil
}

// discharge undoes what charge has counted.
func (in *Inbox) discharge(ctx context.Context, id string) {
	detached, cancel := in.detach(ctx)
	defer cancel()
	_, err := ask(detached, in, func(ctx context.Context) (struct{}, error) { return struct{}{}, in.store.Discharge(ctx, id) })
	if err != nil {
		in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a suspect is charged with what others may do",
			slog.String("message_id", id), slog.String("error", in.textOf(err)))
	}
}
