package inbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
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

// admit asks the sequence gate whether the message may have its effects now. It
// keeps its key locked until the end of the transaction. A replay may, and leaves the
// sequence as it is: whoever asked for it knows that it comes late.
func (in *Inbox) admit(ctx context.Context, tx *boundtx.Tx, w *work) (bool, error) {
	if in.cfg.Sequence == nil || w.replay.marked {
		return true, nil
	}
	seq, ok := in.cfg.Sequence(w.msg)
	key := in.cfg.Key(w.msg)
	if !ok || key == "" {
		return true, nil
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
			over = true // nobody waits for ever
			continue
		}
		in.gaps.forget(w.id)
		return at == nextInLine, nil
	}
}
