package idempotency

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/lent"
)

// groups run requests in transactions that they share.
type groups struct {
	*Engine
	store   *SQLStore
	gather  *group.Group[*exchange, groupEnd]
	claims  *group.Group[Claim, claimEnd]
	repeats *lent.Repeats
}

type groupMember = group.Member[*exchange, groupEnd]

// groupEnd is what has become of a request in a group. Its own goroutine answers.
type groupEnd struct {
	rec        *recorder
	completion Completion
	outcome    txOutcome
	err        error

	answered bool // it has been
	refused  bool // by its handler, which had no effects: rec has its answer

	// slow is its handler, which runs still, in tx, in vain.
	slow *serving
	tx   *sqlGroup
}

const (
	// groupPatience is how long a request waits for a group, and a group for one handler.
	groupPatience = time.Second
	// groupTime is how long handlers of a group may take together: those behind them
	// wait, and so does whoever wants what they have locked.
	groupTime = 250 * time.Millisecond
	// groupResponses is how much a group stores, in bytes, beyond the response that
	// comes to more.
	groupResponses = 4 << 20
)

func newGroups(e *Engine, store *SQLStore) *groups {
	limits := group.Limits{Size: e.cfg.GroupSize, Bytes: math.MaxInt, Patience: groupPatience}
	if store.cfg.Dialect == oncemill.SQLite {
		limits.Writers = 1
	}
	g := &groups{Engine: e, store: store, repeats: lent.NewRepeats(store.db)}
	g.gather = group.New(limits, g)
	g.claims = group.New(limits, claims{store, e.cfg.Logger})
	return g
}

// run runs the handler of x in a group, or alone, and answers.
func (g *groups) run(ctx context.Context, x *exchange) {
	end, done := g.gather.Do(ctx, &groupMember{Work: x, ID: string(x.claim.ID[:]), Since: x.began})
	if end.rec != nil {
		defer end.rec.discard()
	}
	switch {
	case !done:
		x.release(ctx, &x.intent, x.owner)
		x.refuse(ProblemExecutionTimeout)
	case end.answered:
	case end.slow != nil:
		g.afterSlow(ctx, x, end)
	case end.refused:
		x.withoutEffect(ctx, end.rec, end.rec.result())
	case end.outcome == uncertain:
		outcome, err := x.lookUp(ctx, &x.intent, x.owner, end.completion, end.err)
		x.conclude(ctx, end.rec, end.completion, outcome, err)
	default:
		x.conclude(ctx, end.rec, end.completion, end.outcome, end.err)
	}
}

// afterSlow runs a handler alone that was too slow for its group, if there is time after
// it has returned. Its panics come again, too.
func (g *groups) afterSlow(ctx context.Context, x *exchange, end groupEnd) {
	var ending sync.WaitGroup
	ending.Go(func() { end.tx.close(ctx, g.cfg.Logger) }) // waits for a statement that heeds no context
	_, timedOut := end.slow.finished(0, nil)
	end.slow.rec.discard()
	ending.Wait()
	if timedOut {
		x.release(ctx, &x.intent, x.owner)
		return
	}
	x.runAlone(ctx)
}

// Alone runs the handler in a transaction of its own.
func (g *groups) Alone(ctx context.Context, x *exchange) (groupEnd, group.Result) {
	outcome, lost := x.runAlone(ctx)
	result := group.Failed
	switch {
	case lost > 0:
		result = group.InTheWay
	case outcome == committed:
		result = group.Clean
	}
	return groupEnd{answered: true}, result
}

// Together runs the handlers of members in one transaction.
func (g *groups) Together(ctx context.Context, members []*groupMember) ([]*groupMember, group.Result) {
	began := time.Now()
	tx, err := g.store.beginGroup(ctx, g.cfg.Isolation, g.cfg.Timeout, g.repeats, len(members))
	g.telemetry.latency(ctx, "begin", began, err)
	if err != nil {
		for _, m := range members { // alone they would fare no better
			m.Finish(groupEnd{outcome: runAgain, err: err})
		}
		return nil, group.Failed
	}
	r := &groupRun{groups: g, tx: tx, left: slices.Clone(members)}
	defer r.close(ctx)
	result, began := group.Clean, time.Now()
	for i, m := range members {
		if i > 0 && time.Since(began) > groupTime {
			result = group.InTheWay // groups are too large; what has run is committed
			break
		}
		if r.stored > groupResponses {
			result = group.Failed // which says nothing about others
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
