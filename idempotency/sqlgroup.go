package idempotency

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/lent"
)

// claimAll makes claims of different keys that need not be durable, on PostgreSQL. The
// records are in the order of the claims; claims that are not found must be repeated.
// Claims that are sorted by key do not deadlock.
func (s *SQLStore) claimAll(ctx context.Context, claims []Claim) (records []Record, found []bool, err error) {
	type all struct {
		records []Record
		found   []bool
	}
	a, err := within(ctx, s, func(ctx context.Context) (a all, err error) {
		a.records, a.found, err = s.claimTogether(ctx, claims)
		return a, err
	})
	return a.records, a.found, err
}

func (s *SQLStore) claimTogether(ctx context.Context, claims []Claim) (records []Record, found []bool, err error) {
	if err := s.prepareAll(ctx); err != nil {
		return nil, nil, err
	}
	query := func() (*sql.Rows, error) { return s.db.QueryContext(ctx, s.q.claimGroup, claimArgs(claims)...) }
	if stmt := s.stmt(s.q.claimGroup); stmt != nil {
		query = func() (*sql.Rows, error) { return stmt.QueryContext(ctx, claimArgs(claims)...) }
	}
	rows, err := query()
	if err != nil {
		return nil, nil, fmt.Errorf("claim keys: %w", err)
	}
	defer rows.Close() //nolint:errcheck // Err has told
	records, found = make([]Record, len(claims)), make([]bool, len(claims))
	for rows.Next() {
		var place int
		r, err := scan(ID{}, rows, &place)
		if err != nil {
			return nil, nil, fmt.Errorf("claim keys: %w", err)
		}
		r.ID = claims[place-1].ID
		records[place-1], found[place-1] = r, true
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("claim keys: %w", err)
	}
	return records, found, nil
}

func claimArgs(claims []Claim) []any {
	n := len(claims)
	ids, callers, fingerprints, tokens := make([][]byte, n), make([][]byte, n), make([][]byte, n), make([][]byte, n)
	endpoints, correlations, traces := make([]string, n), make([]string, n), make([]string, n)
	leases, retentions := make([]int64, n), make([]int64, n)
	for i := range claims {
		c := &claims[i]
		ids[i], callers[i], fingerprints[i], tokens[i] = c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:]
		endpoints[i], correlations[i], traces[i] = c.Endpoint, c.CorrelationID, c.TraceID
		leases[i], retentions[i] = c.Lease.Microseconds(), c.Retention.Microseconds()
	}
	return []any{
		pq.Array(ids), pq.Array(callers), pq.Array(fingerprints), pq.Array(tokens), pq.Array(endpoints),
		pq.Array(leases), pq.Array(retentions), pq.Array(correlations), pq.Array(traces),
	}
}

// sqlGroup is a transaction that several handlers share.
type sqlGroup struct {
	*sqlTx
	statements lent.Statements
	end        func() error
}

// groupLocks is how long a statement of a group waits for a lock. It is well below
// PostgreSQL's deadlock_timeout, since another group may be waiting for this one.
const groupLocks = "100ms"

// beginGroup begins a transaction for n handlers. It is sealed like that of one handler.
func (s *SQLStore) beginGroup(ctx context.Context, isolation sql.IsolationLevel, idle time.Duration, repeats *lent.Repeats, n int) (*sqlGroup, error) {
	t, err := s.beginPlain(ctx, isolation)
	if err != nil {
		return nil, err
	}
	if s.cfg.Dialect == oncemill.PostgreSQL { // on SQLite each claim has a seal
		if err := t.open(ctx, idle, groupLocks); err != nil {
			t.rollback()
			return nil, err
		}
	}
	g := &sqlGroup{sqlTx: t}
	g.statements, g.end = repeats.Lend(t.tx, n)
	return g, nil
}

// endStatements closes prepared statements before the transaction ends.
func (g *sqlGroup) endStatements(ctx context.Context, log *slog.Logger) {
	spoiled := g.step(context.WithoutCancel(ctx), func(context.Context) error { return g.end() })
	if spoiled != nil && !g.own.Unanswered(spoiled) {
		log.LogAttrs(ctx, slog.LevelWarn, "a pooler's connection has statements of others prepared; nothing is prepared any more",
			slog.Any("error", spoiled))
	}
}

// close rolls back; a no-op after the commit. It waits for a running statement.
func (g *sqlGroup) close(ctx context.Context, log *slog.Logger) {
	g.endStatements(ctx, log)
	g.rollback()
}

// lend returns the transaction as the handler of a claim sees it.
func (g *sqlGroup) lend(ctx context.Context, id ID, owner Owner) (*sqlTx, error) {
	t := &sqlTx{store: g.store, own: g.own, tx: g.tx, id: id, owner: owner, grouped: true}
	t.Handle = lent.New(g.own, g.statements, g.store.cfg.Dialect, ErrTxEnded, t.lost)
	t.Share(ErrTxShared)
	if g.store.cfg.Dialect == oncemill.SQLite {
		if err := t.open(ctx, 0, asConfigured); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// untouched reports whether the handler has had no part in the transaction. On SQLite its
// seal is already a part.
func (t *sqlTx) untouched() bool {
	return t.store.cfg.Dialect == oncemill.PostgreSQL && !t.Used()
}

// completed is a claim to complete.
type completed struct {
	id    ID
	owner Owner
	Completion
}

// complete is the last statement, as for a single handler. stale are the indexes of claims
// that belong to other owners; if there are any, the transaction must not be committed.
func (g *sqlGroup) complete(ctx context.Context, all []completed) (stale []int, err error) {
	return boundtx.Do(ctx, g.own, stepLimit, func(ctx context.Context) ([]int, error) { return g.completeIn(ctx, all) })
}

func (g *sqlGroup) completeIn(ctx context.Context, all []completed) (stale []int, err error) {
	if g.store.cfg.Dialect == oncemill.SQLite {
		for i, c := range all {
			switch err := g.store.update(ctx, g.tx, g.store.q.completeTx, c.id, c.owner, c.Completion); {
			case err == ErrStaleOwner: //nolint:errorlint // as update says it
				stale = append(stale, i)
			case err != nil:
				return nil, err
			}
		}
		return stale, nil
	}
	rows, err := g.query(ctx, g.store.q.completeGroup, groupArgs(all)...)
	if err != nil {
		return nil, fmt.Errorf("complete keys: %w", err)
	}
	defer rows.Close() //nolint:errcheck // Err has told
	for rows.Next() {
		var place int
		if err := rows.Scan(&place); err != nil {
			return nil, fmt.Errorf("complete keys: %w", err)
		}
		stale = append(stale, place-1)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("complete keys: %w", err)
	}
	return stale, nil
}

func groupArgs(all []completed) []any {
	n := len(all)
	ids, owners, responses := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	fences, states, statuses, retentions, forgets := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	large, locations, resources := make([]bool, n), make([]string, n), make([]string, n)
	for i, c := range all {
		ids[i], owners[i], fences[i] = c.id[:], c.owner.Token[:], c.owner.Fence
		states[i], statuses[i], responses[i], large[i] = int64(c.State), int64(c.Status), c.Response, c.Large
		locations[i], resources[i] = c.Location, c.ResourceID
		retentions[i], forgets[i] = c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds()
	}
	return []any{
		pq.Array(ids), pq.Array(owners), pq.Array(fences), pq.Array(states), pq.Array(statuses), pq.Array(responses), pq.Array(large),
		pq.Array(locations), pq.Array(resources), pq.Array(retentions), pq.Array(forgets),
	}
}
