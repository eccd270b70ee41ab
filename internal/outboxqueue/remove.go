package outboxqueue

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Remove deletes rows that the broker has confirmed, and moves them into the history if
// one is kept. It never waits long for a lock: a row that another transaction has
// locked is skipped and returned. After an error, any of the rows may have been
// removed.
//
// A row is matched by lane, id, message id and creation time. A row that is gone, or
// another row that got the same id after the server lost its latest commits, is left
// alone. Removing twice is harmless, whichever worker holds the lane: the message has
// been confirmed.
func (q *Queue) Remove(ctx context.Context, rows []outboxstore.Ref) (removal outboxstore.Removal, err error) {
	rest, missed, locked, err := q.removeByCTID(ctx, rows)
	removal.Missed = missed
	if err != nil || len(rest) == 0 {
		return removal, err
	}
	missed, err = q.MoveOrDelete(ctx, func(ctx context.Context, move bool) (removed int, err error) {
		removed, removal.Locked, err = q.store.Remove(ctx, rest, outboxstore.Removing{Move: move, SkipLocked: locked})
		if sqlerr.TimedOut(err) && !locked && ctx.Err() == nil {
			locked = true
			removed, removal.Locked, err = q.store.Remove(ctx, rest, outboxstore.Removing{Move: move, SkipLocked: true})
		}
		return removed, err
	})
	removal.Missed += missed
	return removal, err
}

// removeByCTID removes rows where they were read, at half the cost. It returns the rest,
// and whether a lock has prevented more.
func (q *Queue) removeByCTID(ctx context.Context, rows []outboxstore.Ref) (rest []outboxstore.Ref, missed int, locked bool, err error) {
	move := q.moves()
	groups, rest := q.store.ByCTID(rows)
	for _, group := range groups {
		if locked {
			rest = append(rest, group...)
			continue
		}
		removed, err := q.store.RemoveAt(ctx, group, move)
		switch {
		case err != nil && inconclusive(ctx, err):
			return nil, missed, false, fmt.Errorf("remove confirmed: %w", err)
		case err == nil && removed:
			if q.retention > 0 && !move {
				missed += len(group)
			}
			continue
		}
		// Any other error is for Remove to report or avoid: it needs no right on the
		// partition, and a broken history does not stop it.
		locked = sqlerr.TimedOut(err)
		rest = append(rest, group...)
	}
	return rest, missed, locked, nil
}

// historyPaused is how long nothing is moved into a history that was found locked: each
// batch would wait for it.
const historyPaused = 10 * time.Second

// moves reports whether confirmed rows are to be moved into the history.
func (q *Queue) moves() bool { return q.retention > 0 && !q.historyPause.lasts(time.Now()) }

// MoveOrDelete removes confirmed rows by means of remove, which moves them into the
// history or deletes them, and returns how many it has removed. If they cannot be moved,
// they are deleted: the history must never stop delivery. It returns the number of rows
// that are not kept because of that, and logs it.
func (q *Queue) MoveOrDelete(ctx context.Context, remove func(ctx context.Context, move bool) (removed int, err error)) (missed int, err error) {
	move := q.moves()
	var broken error
	for {
		removed, err := remove(ctx, move)
		switch {
		case err == nil && (move || q.retention == 0):
			return 0, nil
		case err == nil:
			if broken != nil && removed > 0 {
				q.log.ErrorContext(ctx, "delivered messages are removed without being kept in the history", "rows", removed, "error", broken)
			}
			if sqlerr.TimedOut(broken) {
				q.historyPause.begin(time.Now().Add(historyPaused))
			}
			return removed, nil
		case !move, inconclusive(ctx, err):
			return 0, fmt.Errorf("remove confirmed: %w", err)
		}
		move, broken = false, err
	}
}

// pause is a period during which something is not tried.
type pause struct {
	mu    sync.Mutex // guards what follows
	until time.Time
}

func (p *pause) begin(until time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.until = until
}

// lasts reports whether the pause is not over.
func (p *pause) lasts(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return now.Before(p.until)
}
