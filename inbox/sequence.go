package inbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/text"
)

// gaps remembers, by key, the messages that arrived too early. They are delivered again
// together, in order if the subscriber keeps it. Only the first of them queries the database;
// the others wait for it. After GapWait the first one is handled without its predecessor.
type gaps struct {
	jitter func(time.Duration) time.Duration

	mu   sync.Mutex
	keys map[string]*keyGap
	many int
}

// keyGap is the gap of one key.
type keyGap struct {
	since time.Time // when the key last continued
	next  time.Time // when the messages are delivered again
	early map[string]*waiter
}

type waiter struct {
	seq   int64
	since time.Time
	due   time.Time // of its redelivery
}

const mostGaps = 100_000

// wait records that a message waits, and returns how long it has waited.
func (g *gaps) wait(key, id string, seq int64) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if g.keys == nil || g.many >= mostGaps {
		g.keys, g.many = make(map[string]*keyGap), 0
	}
	of := g.keys[key]
	if of == nil {
		of = &keyGap{since: now, next: now, early: make(map[string]*waiter)}
		g.keys[key] = of
	}
	w := of.early[id]
	if w == nil {
		w = &waiter{seq: seq, since: now, due: now}
		of.early[id] = w
		g.many++
	}
	return now.Sub(w.since)
}

// behind reports whether a message before this one waits here, or is overdue by less than
// gapWait: another process may have it.
func (g *gaps) behind(key string, seq int64, gapWait time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	of := g.keys[key]
	if of == nil {
		return false
	}
	for _, w := range of.early {
		if w.seq < seq && time.Since(w.due) < gapWait {
			return true
		}
	}
	return false
}

// again returns the time until the redelivery of a message that waits. The longer its key
// waits, the longer the time, up to most.
func (g *gaps) again(key, id string, most time.Duration) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	of := g.keys[key]
	if of == nil {
		return g.jitter(comeAgain)
	}
	if !of.next.After(now) {
		of.next = now.Add(g.jitter(max(comeAgain, min(now.Sub(of.since)/8, most))))
	}
	if w := of.early[id]; w != nil {
		w.due = of.next
	}
	return of.next.Sub(now)
}

func (g *gaps) forget(key, id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	of := g.keys[key]
	if of == nil {
		return
	}
	if of.early[id] != nil {
		delete(of.early, id)
		g.many--
	}
	of.since = time.Now()
	of.next = of.since
	if len(of.early) == 0 {
		delete(g.keys, key)
	}
}

// position returns the sequence number of a message within its key, if it has one. A replay
// has none: nothing waits for it, and the operator who asked for it knows that it is late.
func (in *Inbox) position(w *work) (key string, seq int64, ok bool) {
	if in.cfg.Sequence == nil || w.replay != nil {
		return "", 0, false
	}
	seq, ok = in.cfg.Sequence(w.msg)
	key = in.cfg.Key(w.msg)
	return key, seq, ok && key != ""
}

// positionOf returns the position of a message that may make these functions panic.
func (in *Inbox) positionOf(w *work) (key string, seq *int64) {
	_ = nopanic.Call(func() error {
		if k, n, ok := in.position(w); ok && text.Check(k, maxID) == "" {
			key, seq = k, &n
		}
		return nil
	})
	return key, seq
}

// early reports whether the message has to wait for others that wait in this process.
func (in *Inbox) early(w *work) bool {
	key, seq := in.positionOf(w)
	if seq == nil || !in.gaps.behind(key, *seq, in.cfg.GapWait) {
		return false
	}
	in.gaps.wait(key, w.id, *seq)
	return true
}

// comeAfter requests the redelivery of a message that waits for an earlier one.
func (in *Inbox) comeAfter(ctx context.Context, w *work) {
	key, _ := in.positionOf(w)
	yield(ctx)
	delayNack(ctx, in.gaps.again(key, w.id, in.cfg.GapWait))
}

// admit reports whether the message may have its effects now. It keeps its key locked
// until the end of the transaction. A message without a position always may.
func (in *Inbox) admit(ctx context.Context, tx *boundtx.Tx, w *work) (bool, error) {
	key, seq, ok := in.position(w)
	if !ok {
		return true, nil
	}
	if problem := text.Check(key, maxID); problem != "" {
		return false, Permanent(fmt.Errorf("the key of the sequence %s", problem))
	}
	for {
		at, err := boundtx.Wait(ctx, tx, func() (inboxstore.Position, error) { return in.store.Advance(ctx, tx.Raw, key, seq, w.skips) })
		switch {
		case err != nil:
			return false, fmt.Errorf("sequence: %w", err)
		case at == inboxstore.PositionEarly && in.gaps.wait(key, w.id, seq) <= in.cfg.GapWait:
			return false, ErrGap
		case at == inboxstore.PositionEarly && !w.skips:
			retried, err := boundtx.Wait(ctx, tx, func() (bool, error) { return in.store.Retried(ctx, tx.Raw, key, seq, in.cfg.GapWait) })
			if err != nil {
				return false, fmt.Errorf("sequence: %w", err)
			}
			if retried {
				return false, ErrGap
			}
			w.skips = true // waited for GapWait: continue without it, also if it fails and is tried again
			continue
		case at == inboxstore.PositionPassed && (w.tries > 0 || cameBefore(ctx)):
			in.gaps.forget(key, w.id)
			return false, Permanent(ErrOvertaken)
		}
		in.gaps.forget(key, w.id)
		return at == inboxstore.PositionNext, nil
	}
}
