package idempotency

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// groups runs requests in shared transactions.
type groups struct {
	*core
	store   *SQLStore
	gather  *group.Group[*execution, groupEnd]
	repeats *txhandle.Repeats
}

const (
	// groupTime is how long the handlers of a group may take together. The handlers behind
	// them wait, and so do others that need what they have locked.
	groupTime = 250 * time.Millisecond
	// groupResponses is how much a group stores, in bytes; one response may exceed it.
	groupResponses = 4 << 20
)

func newGroups(c *core, store *SQLStore, limits group.Limits) *groups {
	g := &groups{core: c, store: store, repeats: txhandle.NewRepeats(store.db)}
	g.gather = group.New(limits, g)
	return g
}

// run runs the handler of x in a group, or alone.
func (g *groups) run(ctx context.Context, x *execution) ending {
	end, done := g.gather.Do(ctx, &groupMember{Work: x, ID: string(x.claim.ID[:]), Since: x.began})
	switch {
	case !done:
		return ending{outcome: outcomeTimedOut}
	case end.tx != nil:
		return g.afterSlow(ctx, x, end)
	case end.refused:
		return x.withoutEffect(ctx, end.attempt)
	case end.outcome == outcomeUncertain:
		end.outcome, end.err = x.lookUp(ctx, end.completion, end.err)
	}
	return end.ending
}

// afterSlow waits for a handler that was too slow for its group and, if there is time
// left, runs it alone, also after a panic.
func (g *groups) afterSlow(ctx context.Context, x *execution, end groupEnd) ending {
	var closing sync.WaitGroup
	closing.Go(func() { end.tx.close(ctx, g.cfg.Logger) }) // waits for a statement that ignores its context
	end.attempt.wait(x.deadline, x.expire)
	closing.Wait()
	if end.attempt.late {
		return ending{outcome: outcomeTimedOut, attempt: end.attempt}
	}
	end.attempt.discard()
	again, _ := x.runAlone(ctx)
	return again
}

// Alone runs the handler in a transaction of its own.
func (g *groups) Alone(ctx context.Context, x *execution) (groupEnd, group.Result) {
	end, lost := x.runAlone(ctx)
	result := group.Failed
	switch {
	case lost > 0:
		result = group.Contended
	case end.outcome == outcomeStored && x.report(end.attempt) == reportSucceeded:
		result = group.Clean
	}
	return groupEnd{ending: end}, result
}

// Together runs the handlers of members in one transaction.
func (g *groups) Together(ctx context.Context, members []*groupMember) ([]*groupMember, group.Result) {
	if len(members) == 1 { // it is not shared, so it has the whole timeout
		end, result := g.Alone(members[0].Context(), members[0].Work) //nolint:contextcheck // each member has its own
		members[0].Finish(end)
		return nil, result
	}
	began := time.Now()
	tx, err := g.store.beginGroup(ctx, g.cfg.Transactions.Isolation, g.cfg.Timeout, g.repeats, len(members))
	g.telemetry.latency(ctx, "begin", began, err)
	if err != nil {
		for _, m := range members { // alone they would fail too
			m.Finish(groupEnd{ending: ending{outcome: outcomeUnreachable, err: err}})
		}
		return nil, group.Failed
	}
	r := &groupRun{core: g.core, tx: tx, left: slices.Clone(members)}
	defer r.close(ctx)
	result, began := group.Clean, time.Now()
	for i, m := range members {
		if i > 0 && time.Since(began) > groupTime {
			result = group.Contended // groups are too large; what has run is committed
			break
		}
		if r.stored > groupResponses {
			result = group.Failed // not a reason for smaller groups
			break
		}
		if result, ended := r.handle(m); ended { //nolint:contextcheck // each member has its own
			return r.left, result
		}
	}
	if len(r.done) == 0 && result == group.Clean {
		return r.left, group.Failed // nothing was tried
	}
	if len(r.done) > 0 {
		if committed := r.commit(ctx); committed != group.Clean {
			return r.left, committed
		}
	}
	return r.left, result
}
