package inbox

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/lent"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Group limits what shares a transaction under [Inbox.GroupMiddleware].
type Group struct {
	// Size is the most messages of a group. Default: 100. 2 to 10,000. The
	// subscriber must have as many in flight, or more, for groups to fill. A
	// larger one saves little and makes a failure cost more.
	Size int

	// Bytes is the most payload of a group; one message may exceed it.
	// Default: 4 MiB.
	Bytes int

	// Wait is how long the first message of a group waits for others. Default:
	// 0, that is not at all: under load a group gathers while the one before it
	// commits, and without load nothing should wait. At most 1 s.
	Wait time.Duration

	// LockTimeout is how long a statement of a group waits for any lock, on
	// PostgreSQL, before the group is given up and groups become smaller. 1 ms
	// to 1 h. Default: 100 ms, well below the server's deadlock_timeout. On
	// SQLite it has no meaning.
	LockTimeout time.Duration
}

func (g *Group) resolve(dialect oncemill.Dialect, bad func(field, value, problem string)) {
	if g.Size == 0 {
		g.Size = 100
	}
	if g.Size < 2 || g.Size > 10_000 {
		bad("Group.Size", strconv.Itoa(g.Size), "must be 2 to 10000 messages, or 0 for 100")
	}
	if g.Bytes == 0 {
		g.Bytes = 4 << 20
	}
	if g.Bytes < 1 {
		bad("Group.Bytes", strconv.Itoa(g.Bytes), "must be positive, or 0 for 4 MiB")
	}
	if g.Wait < 0 || g.Wait > time.Second {
		bad("Group.Wait", g.Wait.String(), "must be 0 to 1s")
	}
	switch {
	case g.LockTimeout == 0:
		g.LockTimeout = 100 * time.Millisecond
	case dialect == oncemill.SQLite:
		bad("Group.LockTimeout", g.LockTimeout.String(), "SQLite waits as long as the busy timeout of its connection says")
	case g.LockTimeout < time.Millisecond || g.LockTimeout > time.Hour:
		bad("Group.LockTimeout", g.LockTimeout.String(), "must be 1ms to 1h, or 0 for 100ms")
	}
}

// GroupMiddleware is [Inbox.Middleware] for handlers whose effects are SQL
// statements in the transaction and nothing else: messages that are being handled
// at the same time share a transaction, so that they share the cost of its
// commit. Each has its own id, its own handle, and its own outcome.
//
// It is a declaration of the handler's, since what it asks for is that a handler
// may run again after an attempt that left nothing: if a member of a group fails,
// the group is rolled back, the member runs again alone, and the others run again
// without it. Settings that a handler makes for its transaction (set local, a
// role, a search path) would reach the others of its group; such a handler does
// not belong here, nor does one that takes long. Handlers of a group run one
// after the other, sorted by ordering key, at most one of a key. With lib/pq, which
// keeps no prepared statements, a statement with arguments that they execute repeatedly
// is prepared, until one of them queries, for the rest of the transaction.
//
// Groups become smaller, down to one message, when their locks are in the way of
// others: after a deadlock, a serialization failure, or a wait for a lock that
// takes longer than Group.LockTimeout. They grow again slowly. None of this is an
// attempt. A message that was delivered before is always handled alone.
func (in *Inbox) GroupMiddleware(h message.HandlerFunc) message.HandlerFunc {
	return in.middleware(h, in.group.attempt)
}

// group gathers messages that are being handled at the same time. The goroutine
// of one of them, the leader, does the work for all that it takes along.
type group struct {
	in       *Inbox
	prepares atomic.Bool // what handlers repeat

	mu      sync.Mutex
	pending []*member // the oldest first
	leaders int
	pace    pace
	filled  chan struct{} // capacity 1: holds a token when pending may have become enough
}

// member is a message on its way through a group.
type member struct {
	ctx context.Context //nolint:containedctx // of the message, while it is handled
	*work
	key   string
	since time.Time // its arrival

	leader  bool // it has been told to lead; guarded by the group's mu
	failed  int  // groups that it was part of and that were given up
	verdict chan verdict
}

// mostFailed is the number of groups after which a member goes its own way.
const mostFailed = 3

// verdict tells a member what has become of it, or what to do.
type verdict struct {
	do      task
	outcome outcome
	err     error
}

type task int

const (
	finish   task = iota // it is over: outcome, err
	lead                 // take some along and handle them
	runAlone             // in a transaction of its own
)

func newGroup(in *Inbox) *group {
	writers := inParallel
	if in.cfg.Database.Dialect == oncemill.SQLite {
		writers = 1
	}
	g := &group{in: in, pace: newPace(in.cfg.Group.Size, writers), filled: make(chan struct{}, 1)}
	_, prepares := in.db.Driver().(*pq.Driver)
	g.prepares.Store(prepares)
	return g
}

// attempt is an attempt in a transaction that may be shared.
func (g *group) attempt(ctx context.Context, w *work) (outcome, error) {
	d, ok := DeliveryFromContext(ctx)
	if ok && d.Redelivered() || w.replay.marked {
		return g.in.alone(ctx, w)
	}
	m := &member{ctx: ctx, work: w, key: g.in.cfg.Key(w.msg), since: time.Now(), verdict: make(chan verdict, mostFailed+2)}
	if ok && !d.ArrivedAt().IsZero() {
		m.since = d.ArrivedAt()
	}
	if !g.join(m) {
		result, err := g.in.alone(ctx, w)
		g.learn(result, err)
		return result, err
	}
	ended := ctx.Done()
	for {
		select {
		case v := <-m.verdict:
			switch v.do {
			case lead:
				g.lead(m) //nolint:contextcheck // what it does is done for all members, by their contexts
			case runAlone:
				return g.in.alone(ctx, w)
			case finish:
				return v.outcome, v.err
			}
		case <-ended:
			if g.leave(m) {
				return waiting, ctx.Err()
			}
			ended = nil // somebody is at work on it
		}
	}
}

// join makes m wait for a group, unless messages are handled alone now.
func (g *group) join(m *member) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pace.size == 1 {
		return false
	}
	at := len(g.pending)
	for at > 0 && m.since.Before(g.pending[at-1].since) {
		at--
	}
	g.pending = slices.Insert(g.pending, at, m)
	if len(g.pending) >= g.pace.size {
		g.poke()
	}
	g.appoint()
	return true
}

// leave reports whether m was still waiting.
func (g *group) leave(m *member) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.pending, m)
	if i < 0 {
		return false
	}
	g.pending = slices.Delete(g.pending, i, i+1)
	// All that can be there is that it shall lead, and it will not.
	for {
		select {
		case <-m.verdict:
			g.leaders--
		default:
			g.appoint()
			return true
		}
	}
}

// bury forgets a member whose goroutine has ended: nobody hears what it is told.
func (g *group) bury(m *member) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.failed = mostFailed // a group that has it along does not give it back
	if i := slices.Index(g.pending, m); i >= 0 {
		g.pending = slices.Delete(g.pending, i, i+1)
	}
	for {
		select {
		case v := <-m.verdict:
			if v.do == lead {
				g.leaders--
			}
		default:
			return
		}
	}
}

// appoint tells waiting members to lead, as many as may at once. The first takes
// what there is; beside it only full groups are handled, so that the others gather
// meanwhile instead of going in many small ones. Called with mu held.
func (g *group) appoint() {
	led := 0 // of the waiting, by those that will lead
	for _, m := range g.pending {
		if m.leader {
			led += g.pace.size
		}
	}
	for _, m := range g.pending {
		full := len(g.pending)-led >= g.pace.size
		if g.leaders >= g.pace.leaders() || g.leaders > 0 && !full {
			return
		}
		if !m.leader {
			m.leader = true
			g.leaders++
			led += g.pace.size
			m.verdict <- verdict{do: lead}
		}
	}
}

func (g *group) poke() {
	select {
	case g.filled <- struct{}{}:
	default:
	}
}

// learn takes into account how a message fared that was handled alone because
// groups are of one.
func (g *group) learn(result outcome, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case err == nil && result == handled:
		g.pace.clean(1)
	case inTheWay(err):
		g.pace.conflict()
	}
}

// lead handles one group, by the goroutine of m.
func (g *group) lead(m *member) {
	left := g.take(m)
	ended := false
	// Also when a handler ends this goroutine.
	defer func() {
		for _, m := range left {
			m.verdict <- verdict{do: runAlone}
		}
		if !ended {
			g.bury(m)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.leaders--
		g.appoint()
	}()
	for round := 0; len(left) > 0 && round < mostRounds; round++ {
		left = g.handle(left)
	}
	ended = true
}

// mostRounds is how often a group is tried, each time without one that failed.
const mostRounds = 4

// take removes a group's members from those that wait. Its leader may be left behind,
// if enough have come that are older; then it can be told again.
func (g *group) take(leader *member) []*member {
	cfg := g.in.cfg.Group
	g.mu.Lock()
	defer g.mu.Unlock()
	if cfg.Wait > 0 {
		g.await(cfg.Wait)
	}
	leader.leader = false
	var batch []*member
	bytes, keys, ids := 0, map[string]bool{}, map[string]bool{}
	rest := g.pending[:0]
	for _, m := range g.pending {
		size := len(m.msg.Payload)
		full := len(batch) >= g.pace.size || len(batch) > 0 && bytes+size > cfg.Bytes
		if full || ids[m.id] || m.key != "" && keys[m.key] {
			rest = append(rest, m)
			continue
		}
		bytes += size
		ids[m.id], keys[m.key] = true, true
		batch = append(batch, m)
	}
	clear(g.pending[len(rest):])
	g.pending = rest
	g.poke() // another leader may be waiting for what is gone
	// Groups that lock in the same order do not deadlock. If what a handler
	// writes goes by its key, this is such an order.
	slices.SortFunc(batch, func(a, b *member) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.id, b.id))
	})
	return batch
}

// await returns when enough are waiting for a group, or after some time. Called
// with mu held.
func (g *group) await(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for len(g.pending) > 0 && len(g.pending) < g.pace.size {
		g.mu.Unlock()
		over := false
		select {
		case <-g.filled:
		case <-timer.C:
			over = true
		}
		g.mu.Lock()
		if over {
			return
		}
	}
}

// handle handles members in one transaction and tells them their verdicts. It
// returns those to be handled again as a group.
func (g *group) handle(members []*member) (again []*member) {
	ctx, done := together(members)
	defer done()
	claimed, culprit, result, err := g.try(ctx, members)
	switch {
	case err == nil:
		for _, m := range members {
			switch {
			case claimed[m.id]:
				m.verdict <- verdict{outcome: handled}
			case m.fingerprint != nil: // is yet to be compared
				m.verdict <- verdict{do: runAlone}
			default:
				g.in.logDuplicate(m.ctx, m.id)
				m.verdict <- verdict{outcome: duplicate}
			}
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.pace.clean(len(members))
		return nil
	case inTheWay(err):
		g.split(members)
		return nil
	case culprit != nil:
		culprit.verdict <- verdict{do: runAlone}
		return slices.DeleteFunc(slices.Clone(members), func(m *member) bool { return m == culprit })
	case result == databaseAway, result == commitUnknown, ctx.Err() != nil:
		// Alone they would fare no better.
		for _, m := range members {
			m.verdict <- verdict{outcome: result, err: err}
		}
		return nil
	}
	// It is not known whose fault it was: a deferred constraint, perhaps.
	for _, m := range members {
		m.verdict <- verdict{do: runAlone}
	}
	return nil
}

// try is one transaction for all members. The culprit is the member whose handler
// failed.
func (g *group) try(ctx context.Context, members []*member) (claimed map[string]bool, culprit *member, result outcome, err error) {
	in := g.in
	tx, err := in.store.begin(ctx)
	if err != nil {
		return nil, nil, claimFailed(err), fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // as in alone
	byID := slices.SortedFunc(slices.Values(members), func(a, b *member) int { return cmp.Compare(a.id, b.id) })
	if claimed, err = in.store.claimGroup(ctx, tx, byID); err != nil {
		return nil, nil, claimFailed(err), err
	}
	if len(claimed) == 0 {
		return claimed, nil, duplicate, nil
	}
	statements, endStatements := g.statements(ctx, tx, len(claimed))
	defer endStatements()
	for _, m := range members {
		if !claimed[m.id] {
			continue
		}
		if err := in.effect(m.ctx, tx, statements, m.work); err != nil { //nolint:contextcheck // each member has its own
			return nil, m, handlerFailed, err
		}
	}
	endStatements()
	if err := in.store.sealGroup(ctx, tx, claimed); err != nil {
		return nil, nil, commitFailed(err), err
	}
	result, err = in.commit(ctx, tx)
	return claimed, nil, result, err
}

// statements returns tx as the handlers of a group of n see it. What they repeat is
// prepared where that pays: it costs a round trip before and one after, and other
// drivers than lib/pq do it themselves or, as SQLite's, have no server to save from
// it.
func (g *group) statements(ctx context.Context, tx *sql.Tx, n int) (statements lent.Statements, end func()) {
	const worthwhile = 8
	if !g.prepares.Load() || n < worthwhile {
		return tx, func() {}
	}
	repeated := lent.Repeat(tx)
	return repeated, func() {
		if err := repeated.Close(); sqlerr.State(err) == nameTaken && g.prepares.Swap(false) {
			g.in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a pooler's connection has statements of others prepared; nothing is prepared any more",
				slog.String("consumer", g.in.cfg.Consumer), slog.Any("error", err))
		}
	}
}

// nameTaken is the SQLSTATE of a statement that is prepared under a name that the
// connection knows already. lib/pq counts from 1 on each of its connections, so behind
// a pooler this comes of whoever has left one prepared.
const nameTaken = "42P05"

// split makes groups smaller and lets members that were in each other's way, or in
// that of others, try again. Nobody has spent an attempt.
func (g *group) split(members []*member) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pace.conflict()
	var again []*member
	for _, m := range members {
		if m.failed++; m.failed >= mostFailed || g.pace.size == 1 {
			m.verdict <- verdict{do: runAlone}
			continue
		}
		m.leader = false
		again = append(again, m)
	}
	g.pending = append(again, g.pending...)
	slices.SortStableFunc(g.pending, func(a, b *member) int { return a.since.Compare(b.since) })
}

// inTheWay reports that a transaction failed because of others that ran at the
// same time: a deadlock, a serialization failure, a lock that did not come.
func inTheWay(err error) bool {
	return err != nil && (heldElsewhere(err) || sqlerr.Retryable(err) || errors.Is(err, ErrBeingHandled))
}

// together returns a context for what is done for all members: it has the values
// of the first one's, and ends when those of all have ended.
func together(members []*member) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(members[0].ctx))
	var left atomic.Int64
	left.Store(int64(len(members)))
	stops := make([]func() bool, len(members))
	for i, m := range members {
		stops[i] = context.AfterFunc(m.ctx, func() {
			if left.Add(-1) == 0 {
				cancel()
			}
		})
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel()
	}
}
