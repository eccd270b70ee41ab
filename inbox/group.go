package inbox

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/group"
	"github.com/oncemill/oncemill/internal/inboxstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// Group limits the groups that share a transaction under [Inbox.GroupMiddleware] and
// [Inbox.Batch].
type Group struct {
	// Size is the largest number of messages of a group. Default: 100. 2 to 10,000. For
	// groups to fill, the subscriber must have at least as many messages in flight. A larger
	// group saves little and makes a failure cost more.
	Size int

	// Bytes is the largest total payload of a group; a single message may exceed it.
	// Default: 4 MiB.
	Bytes int

	// Wait is how long the first message of a group waits for others. Default: 0, no wait:
	// under load a group fills while the one before it commits, and without load nothing
	// should wait. At most 1 s.
	Wait time.Duration

	// LockTimeout is how long, on PostgreSQL, a statement of a group waits for any lock
	// before the group is given up and groups become smaller. 1 ms to 1 h. Default: 100 ms,
	// well below the server's deadlock_timeout. On SQLite it has no effect.
	LockTimeout time.Duration
}

func (g *Group) resolve(bad func(field, value, problem string)) {
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
}

// GroupMiddleware is [Inbox.Middleware] for handlers whose only effects are SQL statements
// in the transaction. Messages that are being handled at the same time share a
// transaction, and the cost of its commit. Each has its own id, its own handle, and its
// own outcome.
//
// It requires that a handler may run again after an attempt that left nothing behind. If a
// member of a group fails, the group is rolled back, the member runs again alone, and the
// others run again without it. A handler that changes settings for its transaction (set
// local, set_config) or makes a temporary table gets ErrShared and runs again alone, so it
// gains nothing here. Do not use groups for a handler that rolls back to savepoints it has not set, because they
// would affect the others of its group, nor for one that takes long: one that has not
// returned two seconds after Config.Timeout runs again, alone, beside that. Handlers of a group
// run one after the other, sorted by ordering key, at most one of a key. lib/pq keeps no
// prepared statements. With it, a statement with arguments that handlers execute
// repeatedly is prepared, for the rest of the transaction or until a handler runs a query.
//
// Groups become smaller, down to one message, when their locks block others: after a
// deadlock, a serialization failure, or a wait for a lock that takes longer than
// Group.LockTimeout. They grow again slowly. None of this uses up an attempt. A message
// that was delivered before, or has failed, is handled alone.
func (in *Inbox) GroupMiddleware(h message.HandlerFunc) message.HandlerFunc {
	return in.middleware(h, in.group.attempt)
}

// shared handles messages in shared transactions.
type shared struct {
	in      *Inbox
	gather  *group.Group[*work, ended]
	repeats *txhandle.Repeats
	batch   BatchHandler   // nil where each message has its own handler
	calls   *bounded.Calls // of handlers
}

type member = group.Member[*work, ended]

// ended is the outcome of an attempt.
type ended struct {
	outcome outcome
	err     error
}

func newShared(in *Inbox, batch BatchHandler) *shared {
	cfg := in.cfg.Group
	limits := group.Limits{Size: cfg.Size, Bytes: cfg.Bytes, Wait: cfg.Wait, Writers: in.store.Writers()}
	s := &shared{in: in, repeats: txhandle.NewRepeats(in.db), batch: batch, calls: bounded.New(mostAbandoned)}
	s.gather = group.New(limits, s)
	return s
}

// attempt makes an attempt in a transaction that may be shared.
func (s *shared) attempt(ctx context.Context, w *work) (outcome, error) {
	d, ok := DeliveryFromContext(ctx)
	if ok && (d.Redelivered() || d.Nacks() > 0) || w.tries > 0 || w.replay != nil {
		return s.in.alone(ctx, w)
	}
	m := &member{Work: w, ID: w.id, Key: s.in.cfg.Key(w.msg), Bytes: len(w.msg.Payload), Since: time.Now()}
	if ok && !d.ArrivedAt().IsZero() {
		m.Since = d.ArrivedAt()
	}
	e, done := s.gather.Do(ctx, m)
	if !done {
		return outcomeWaiting, ctx.Err()
	}
	return e.outcome, e.err
}

// Alone makes an attempt in a transaction of its own.
func (s *shared) Alone(ctx context.Context, w *work) (ended, group.Result) {
	result, err := s.in.alone(ctx, w)
	switch {
	case err == nil && result == outcomeHandled:
		return ended{result, err}, group.Clean
	case contended(err):
		return ended{result, err}, group.Contended
	}
	return ended{result, err}, group.Failed
}

// Together handles members in one transaction.
func (s *shared) Together(ctx context.Context, members []*member) (again []*member, result group.Result) {
	claimed, culprit, e := s.try(ctx, members)
	switch {
	case e.err == nil:
		s.committed(members, claimed) //nolint:contextcheck // each member has its own
		return nil, group.Clean
	case contended(e.err):
		return members, group.Contended
	case culprit != nil:
		if culprit.Context().Err() != nil {
			culprit.Finish(e) // alone it would have no time
		} else {
			culprit.Alone()
		}
		return slices.DeleteFunc(slices.Clone(members), func(m *member) bool { return m == culprit }), group.Failed
	case e.outcome == outcomeDatabaseDown, e.outcome == outcomeCommitUnknown, ctx.Err() != nil:
		// They would fail alone too.
		for _, m := range members {
			m.Finish(e)
		}
	case s.batch != nil && !errors.Is(e.err, errNotReturned): // in each part it would not return either
		s.search(ctx, members)
	default:
		// It is unknown which message is at fault: it may have been a deferred constraint.
		s.disband(members)
	}
	return nil, group.Failed
}

func (s *shared) disband(members []*member) {
	for _, m := range members {
		m.Alone()
	}
}

// committed reports to members that their transaction has committed.
func (s *shared) committed(members []*member, claimed map[string]bool) {
	for _, m := range members {
		switch {
		case claimed[m.ID]:
			m.Finish(ended{outcome: outcomeHandled})
		case m.Work.fingerprint != nil: // is yet to be compared
			m.Alone()
		default:
			s.in.logDuplicate(m.Context(), m.ID)
			m.Finish(ended{outcome: outcomeDuplicate})
		}
	}
}

// try runs one transaction for all members. The culprit is the member whose handler
// failed.
func (s *shared) try(unlimited context.Context, members []*member) (claimed map[string]bool, culprit *member, e ended) {
	in := s.in
	ctx, cancel := context.WithTimeout(unlimited, in.cfg.Timeout)
	defer cancel()
	ctx, span := in.tracing.beginGroup(ctx, members)
	defer func() { endSpan(span, e.outcome, e.err, in.textOf) }()
	tx, err := in.store.Begin(ctx, in.calls)
	if err != nil {
		return nil, nil, ended{claimFailed(unlimited, err), fmt.Errorf("begin: %w", err)}
	}
	defer tx.Rollback() // as in alone
	claims := make([]inboxstore.Claim, len(members))
	for i, m := range members {
		claims[i] = inboxstore.Claim{ID: m.ID, Fingerprint: m.Work.fingerprint}
	}
	slices.SortFunc(claims, func(a, b inboxstore.Claim) int { return cmp.Compare(a.ID, b.ID) })
	claimed, err = boundtx.Do(ctx, tx, in.cfg.Group.LockTimeout+callLimit, func(ctx context.Context) (map[string]bool, error) {
		return in.store.ClaimGroup(ctx, tx.Raw, claims)
	})
	if err != nil {
		return nil, nil, ended{claimFailed(unlimited, err), err}
	}
	if len(claimed) == 0 {
		return claimed, nil, ended{outcome: outcomeDuplicate}
	}
	if culprit, err = s.attend(ctx, tx, members, claimed); err != nil {
		if tx.Unanswered(err) {
			return nil, nil, ended{outcomeDatabaseDown, errors.Join(err, bounded.ErrAbandoned)}
		}
		return nil, culprit, ended{outcomeHandlerFailed, err}
	}
	_, err = within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (struct{}, error) {
		return struct{}{}, in.store.SealGroup(ctx, tx, claimed)
	})
	if err != nil {
		return nil, nil, ended{commitFailed(err), err}
	}
	result, err := in.commit(tx)
	return claimed, nil, ended{result, err}
}

// errNotReturned is the end of a group in which a handler ignores that its time is over.
var errNotReturned = fmt.Errorf("a handler of the group has not returned: %w", context.DeadlineExceeded)

// attend runs the handlers, and waits for them for two seconds longer than the transaction
// lasts. One that does not return holds up its own message then, as it would alone, and not
// those that shared its transaction. It has no transaction any more, and no handler runs after
// it. One that ends its goroutine ends no member's.
func (s *shared) attend(ctx context.Context, tx *boundtx.Tx, members []*member, claimed map[string]bool) (*member, error) {
	type result struct {
		culprit *member
		err     error
	}
	patient, impatient := context.WithCancel(context.WithoutCancel(ctx))
	defer impatient()
	// What a statement of the handler waits for comes before.
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, impatient) })()
	var running atomic.Pointer[member]
	ran, err := bounded.Do(patient, s.calls, math.MaxInt64, func(context.Context) (r result, _ error) {
		r.culprit, r.err = s.effects(ctx, tx, members, claimed, &running)
		return r, nil
	})
	switch {
	case err == nil:
		return ran.culprit, ran.err
	case errors.Is(err, bounded.ErrAbandoned), errors.Is(err, bounded.ErrTooManyAbandoned):
		err = errNotReturned
	}
	return running.Load(), err
}

// effects runs the handlers of the members whose ids were claimed. running is the one whose
// handler runs.
func (s *shared) effects(ctx context.Context, tx *boundtx.Tx, members []*member, claimed map[string]bool, running *atomic.Pointer[member]) (culprit *member, err error) {
	if s.batch != nil {
		return s.batchEffect(ctx, tx, members, claimed)
	}
	statements, end := s.repeats.Statements(tx.Raw, len(claimed))
	defer func() {
		_, spoiled := boundtx.Do(context.WithoutCancel(ctx), tx, callLimit, func(context.Context) (struct{}, error) { return struct{}{}, end() })
		if spoiled != nil && !noAnswer(spoiled) {
			s.in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a pooled connection already has a prepared statement of this name; statements are no longer prepared",
				slog.String("consumer", s.in.cfg.Consumer), slog.Any("error", spoiled))
		}
	}()
	for _, m := range members {
		if !claimed[m.ID] {
			continue
		}
		if ctx.Err() != nil {
			return nil, ctx.Err() // after a handler that took longer nobody waits
		}
		running.Store(m)
		if err := s.in.effect(until(ctx, m.Context()), tx, statements, m.Work, ErrShared); err != nil {
			return m, err
		}
	}
	return nil, nil
}

// until returns ctx, the context of a member, with the deadline of the transaction's
// context. It ends with the transaction and not before: rows that a handler left open
// would otherwise end the transaction too.
func until(transaction, ctx context.Context) context.Context {
	deadline, _ := transaction.Deadline() // try has set it
	ctx, cancel := context.WithDeadline(ctx, deadline)
	context.AfterFunc(transaction, cancel)
	return ctx
}

// contended reports whether a transaction failed because of concurrent transactions: a
// deadlock, a serialization failure, a lock timeout.
func contended(err error) bool {
	return err != nil && (sqlerr.Contended(err) || errors.Is(err, ErrBeingHandled))
}
