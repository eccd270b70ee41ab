package idempotency

import (
	"context"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/lent"
	"github.com/oncemill/oncemill/internal/sqlerr"
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

	answered bool     // it has been
	refused  bool     // by its handler, which had no effects: rec has its answer
	slow     *serving // its handler, which runs still; what it does is in vain
}

// patience is how long a request waits for a group, and a group for the handler of one.
const patience = time.Second

func newGroups(e *Engine, store *SQLStore) *groups {
	limits := group.Limits{Size: e.cfg.GroupSize, Bytes: math.MaxInt, Patience: patience}
	if store.cfg.Dialect == oncemill.SQLite {
		limits.Writers = 1
	}
	g := &groups{Engine: e, store: store, repeats: lent.NewRepeats(store.db)}
	g.gather = group.New(limits, g)
	g.claims = group.New(limits, claims{store})
	return g
}

// claims are made by one statement, and share the cost of its commit.
type claims struct {
	store *SQLStore
}

// claimEnd is what [Store.Claim] returns.
type claimEnd struct {
	record  Record
	granted bool
	err     error
}

// claim makes a claim, maybe with others.
func (g *groups) claim(ctx context.Context, c Claim) (Record, bool, error) {
	if g.store.cfg.Dialect == oncemill.SQLite || c.Durable { // which first reads; which waits for the disk
		return g.store.Claim(ctx, c)
	}
	end, done := g.claims.Do(ctx, &group.Member[Claim, claimEnd]{Work: c, ID: string(c.ID[:]), Since: time.Now()})
	if !done {
		return Record{}, false, ctx.Err()
	}
	return end.record, end.granted, end.err
}

// Alone makes one claim.
func (c claims) Alone(ctx context.Context, claim Claim) (claimEnd, group.Result) {
	record, granted, err := c.store.Claim(ctx, claim)
	return claimEnd{record, granted, err}, group.Clean
}

// Together makes several. Whatever goes wrong is left to each alone, as is a copy of a key
// that comes at the same time: it was not taken along.
func (c claims) Together(ctx context.Context, members []*group.Member[Claim, claimEnd]) ([]*group.Member[Claim, claimEnd], group.Result) {
	if len(members) == 1 {
		end, result := c.Alone(ctx, members[0].Work) // here, so that others gather meanwhile
		members[0].Finish(end)
		return nil, result
	}
	all := make([]Claim, len(members))
	for i, m := range members {
		all[i] = m.Work
	}
	records, found, err := c.store.claimAll(ctx, all)
	for i, m := range members {
		if err != nil || !found[i] {
			m.Alone()
			continue
		}
		m.Finish(claimEnd{record: records[i], granted: grants(records[i], m.Work)})
	}
	return nil, group.Clean
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
		g.again(ctx, x, end.slow)
	case end.refused:
		x.withoutEffect(ctx, end.rec, end.rec.result())
	case end.outcome == uncertain:
		outcome, err := x.lookUp(ctx, &x.intent, x.owner, end.completion, end.err)
		x.conclude(ctx, end.rec, end.completion, outcome, err)
	default:
		x.conclude(ctx, end.rec, end.completion, end.outcome, end.err)
	}
}

// again runs a handler alone that was too slow for a group, if there is time after it
// has returned. Its panics come again, too.
func (g *groups) again(ctx context.Context, x *exchange, slow *serving) {
	_, timedOut := slow.finished(0, nil)
	slow.rec.discard()
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
	for _, m := range members {
		if result, ended := r.handle(m); ended { //nolint:contextcheck // each member has its own
			return r.left, result
		}
	}
	if len(r.done) == 0 {
		return nil, group.Failed
	}
	return r.left, r.commit(ctx)
}

// groupRun is one transaction of a group.
type groupRun struct {
	*groups
	tx   *sqlGroup
	left []*groupMember // not settled
	done []*groupMember // of these, those whose handlers have run
	ends []groupEnd     // of done
}

// close ends the transaction, and lets go of what was recorded in vain.
func (r *groupRun) close(ctx context.Context) {
	r.endStatements(ctx)
	r.tx.rollback() // a no-op after the commit
	for _, end := range r.ends {
		end.rec.discard()
	}
}

func (r *groupRun) endStatements(ctx context.Context) {
	if spoiled := r.tx.end(); spoiled != nil {
		r.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a pooler's connection has statements of others prepared; nothing is prepared any more",
			slog.Any("error", spoiled))
	}
}

func (r *groupRun) settled(m *groupMember) {
	r.left = slices.DeleteFunc(r.left, func(other *groupMember) bool { return other == m })
}

// alone ends the group for m, which goes its own way.
func (r *groupRun) alone(m *groupMember) group.Result {
	r.settled(m)
	m.Alone()
	return group.Failed
}

// handle runs the handler of m. ended tells that the transaction must not go on.
func (r *groupRun) handle(m *groupMember) (result group.Result, ended bool) {
	x := m.Work
	t, err := r.tx.lend(m.Context(), x.claim.ID, x.owner)
	if err != nil {
		return r.alone(m), true
	}
	called := x.start(m.Context(), t)
	p, returned := called.waitFor(patience)
	x.at("after effect")
	reason := t.Close(ErrTxEnded) // what the handler has overlooked
	if !returned {
		r.disband(m, called)
		return group.InTheWay, true
	}
	called.cancel()
	rec := called.rec
	failed := p != nil || rec.failed != nil || !time.Now().Before(called.deadline)
	refused := !failed && rec.result().Status >= http.StatusBadRequest
	switch {
	case refused && t.untouched():
		r.settled(m)
		m.Finish(groupEnd{rec: rec, refused: true})
		return group.Clean, false
	case t.beaten.Load():
		rec.discard()
		return group.InTheWay, true
	case failed, refused, reason != nil:
		rec.discard()
		return r.alone(m), true
	}
	completion, err := x.completion(rec.result(), false)
	if err != nil {
		rec.discard()
		return r.alone(m), true
	}
	r.done = append(r.done, m)
	r.ends = append(r.ends, groupEnd{rec: rec, completion: completion, outcome: committed})
	return group.Clean, false
}

// disband lets all others go their own way, while m waits for its handler, whose
// context ends.
func (r *groupRun) disband(m *groupMember, slow *serving) {
	slow.cancel()
	r.tx.rollback()
	for _, other := range r.left {
		if other != m {
			other.Alone()
		}
	}
	r.left = nil
	m.Finish(groupEnd{slow: slow})
}

// commit completes the claims of those whose handlers have run, and commits.
func (r *groupRun) commit(ctx context.Context) group.Result {
	r.endStatements(ctx)
	all := make([]completed, len(r.done))
	for i, m := range r.done {
		all[i] = completed{m.Work.claim.ID, m.Work.owner, r.ends[i].completion}
	}
	began := time.Now()
	stale, err := r.tx.complete(ctx, all)
	r.telemetry.latency(ctx, "complete_tx", began, err)
	if err == nil && len(stale) > 0 {
		for _, i := range stale {
			r.alone(r.done[i])
		}
		return group.Failed
	}
	// As in finish.
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return r.failed(err)
	}
	r.at("before commit")
	began = time.Now()
	err = r.tx.commit()
	r.telemetry.latency(ctx, "commit", began, err)
	r.at("after commit")
	outcome := committed
	if sqlerr.CommitUnknown(err) {
		outcome = uncertain
	} else if err != nil {
		return r.failed(err)
	}
	for i, m := range r.done {
		r.ends[i].outcome, r.ends[i].err = outcome, err
		m.Finish(r.ends[i])
	}
	r.left, r.ends = nil, nil
	return group.Clean
}

// failed ends a group that could not be committed.
func (r *groupRun) failed(err error) group.Result {
	if sqlerr.Retryable(err) || sqlerr.State(err) == lockTimedOut {
		return group.InTheWay
	}
	for _, m := range r.left { // it is not known whose fault it was: a deferred constraint, perhaps
		m.Alone()
	}
	r.left = nil
	return group.Failed
}
