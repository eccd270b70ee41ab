package inbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/contain"
)

// gaps remembers since when messages that came too early wait.
type gaps struct {
	mu    sync.Mutex
	since map[string]time.Time // by id
}

const mostGaps = 100_000

// waited returns for how long the message has been known to wait.
func (g *gaps) waited(id string) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	since, ok := g.since[id]
	if !ok {
		if g.since == nil || len(g.since) >= mostGaps {
			g.since = make(map[string]time.Time)
		}
		g.since[id] = time.Now()
		return 0
	}
	return time.Since(since)
}

func (g *gaps) forget(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.since, id)
}

// place is where a message stands in the sequence of its key.
type place int

const (
	nextInLine place = iota
	outdated         // a later one has had its effects
	early            // one before it has not come
)

// place is the number of a message among those of its key, if it has one.
func (in *Inbox) place(w *work) (key string, seq int64, ok bool) {
	seq, ok = in.cfg.Sequence(w.msg)
	key = in.cfg.Key(w.msg)
	return key, seq, ok && key != ""
}

// placeOf is the place of a message that may be why these functions panic. A replay has
// none: nothing waits for it.
func (in *Inbox) placeOf(w *work) (key string, seq *int64) {
	if in.cfg.Sequence == nil || w.replay.marked() {
		return "", nil
	}
	_ = contain.Call(func() error {
		if k, n, ok := in.place(w); ok && checkText(k) == "" {
			key, seq = k, &n
		}
		return nil
	})
	return key, seq
}

// admit asks the sequence gate whether the message may have its effects now. It
// keeps its key locked until the end of the transaction. A replay may, and leaves the
// sequence as it is: whoever asked for it knows that it comes late.
func (in *Inbox) admit(ctx context.Context, tx *boundtx.Tx, w *work) (bool, error) {
	if in.cfg.Sequence == nil || w.replay.marked() {
		return true, nil
	}
	key, seq, ok := in.place(w)
	if !ok {
		return true, nil
	}
	if problem := checkText(key); problem != "" {
		return false, Permanent(fmt.Errorf("the key of a sequence %s", problem))
	}
	over := false
	for {
		at, err := boundtx.Wait(ctx, tx, func() (place, error) { return in.store.advance(ctx, tx.Raw, key, seq, over) })
		switch {
		case err != nil:
			return false, fmt.Errorf("sequence: %w", err)
		case at == early && in.gaps.waited(w.id) <= in.cfg.GapWait:
			return false, ErrGap
		case at == early && !over:
			retried, err := boundtx.Wait(ctx, tx, func() (bool, error) { return in.store.retried(ctx, tx.Raw, key, seq, in.cfg.GapWait) })
			if err != nil {
				return false, fmt.Errorf("sequence: %w", err)
			}
			if retried {
				return false, ErrGap
			}
			over = true // nobody waits for ever
			continue
		case at == outdated && (w.failed || cameBefore(ctx)):
			return false, Permanent(ErrOvertaken)
		}
		in.gaps.forget(w.id)
		return at == nextInLine, nil
	}
}
