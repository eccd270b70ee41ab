package keystore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgres is the Store on PostgreSQL.
type postgres struct {
	common
	q postgresTexts
}

// postgresTexts are the statements.
type postgresTexts struct {
	Claim, ClaimGroup, Find, TakeOver, Outstanding, Extend, Release, Complete string
	Purge, Expire                                                             string
	Seal, Finish, FinishGroup, Check                                          string
	CountStarted, Estimate                                                    string
	operatorTexts
	archiveTexts
}

// Traits implements [Store].
func (*postgres) Traits() Traits { return Traits{ClaimsTogether: true} }

// session is the pool or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// pool is the pool as a session, with its prepared statements.
type pool struct{ *prepared }

func (p pool) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return p.db.ExecContext(ctx, query, args...)
}

func (p pool) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return p.row(ctx, query, args...)
}

// single runs do for a single statement outside any other transaction. A serialization
// failure only means that PostgreSQL's default is a higher isolation level; do then runs
// again at READ COMMITTED, where each statement here is a reliable compare-and-set.
func (s *postgres) single(ctx context.Context, do func(session) error) error {
	err := do(pool{s.prepared})
	if !sqlerr.Retryable(err) {
		return err
	}
	return shorttx.Run(ctx, s.db, shorttx.Within(ctx), func(tx *sql.Tx) error { return do(tx) })
}

// record queries a record.
func (s *postgres) record(ctx context.Context, id ID, text string, args ...any) (r Record, found bool, err error) {
	err = s.single(ctx, func(via session) (err error) {
		r, found, err = scanRow(id, via.QueryRowContext(ctx, text, args...))
		return err
	})
	return r, found, err
}

// change executes a statement, and returns how many rows it has changed.
func (s *postgres) change(ctx context.Context, text string, args ...any) (n int64, err error) {
	err = s.single(ctx, func(via session) error {
		n, err = database.Affected(via.ExecContext(ctx, text, args...))
		return err
	})
	return n, err
}

// Claim implements [Store]. It is one round trip.
func (s *postgres) Claim(ctx context.Context, c Claim) (Record, bool, error) {
	if err := s.prepared.ready(ctx); err != nil {
		return Record{}, false, err
	}
	return s.record(ctx, c.ID, s.q.Claim, append(claimArgs(c), c.Durable)...)
}

// ClaimAll implements [Store].
func (s *postgres) ClaimAll(ctx context.Context, claims []Claim) (records []Record, found []bool, err error) {
	if err := s.prepared.ready(ctx); err != nil {
		return nil, nil, err
	}
	rows, err := s.prepared.rows(ctx, s.q.ClaimGroup, claimGroupArgs(claims)...)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close() //nolint:errcheck // Err returns what went wrong
	records, found = make([]Record, len(claims)), make([]bool, len(claims))
	for rows.Next() {
		var position int
		r, err := scan(ID{}, rows, &position)
		if err != nil {
			return nil, nil, err
		}
		r.ID = claims[position-1].ID
		records[position-1], found[position-1] = r, true
	}
	return records, found, rows.Err()
}

func claimGroupArgs(claims []Claim) []any {
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

// TakeOver implements [Store].
func (s *postgres) TakeOver(ctx context.Context, c Claim, from Owner) (Record, bool, error) {
	return s.record(ctx, c.ID, s.q.TakeOver, append(takeOverArgs(c, from), c.Durable)...)
}

// Find implements [Store].
func (s *postgres) Find(ctx context.Context, id ID) (Record, bool, error) {
	return s.record(ctx, id, s.q.Find, id[:])
}

// Outstanding implements [Store].
func (s *postgres) Outstanding(ctx context.Context, caller [16]byte, limit int) (n int, err error) {
	err = s.single(ctx, func(via session) error { return via.QueryRowContext(ctx, s.q.Outstanding, caller[:], limit).Scan(&n) })
	return n, err
}

// Extend implements [Store].
func (s *postgres) Extend(ctx context.Context, id ID, owner Owner, lease time.Duration) (bool, error) {
	n, err := s.change(ctx, s.q.Extend, id[:], owner.Token[:], owner.Fence, lease.Microseconds())
	return n == 1, err
}

// Release implements [Store].
func (s *postgres) Release(ctx context.Context, id ID, owner Owner) (bool, error) {
	n, err := s.change(ctx, s.q.Release, id[:], owner.Token[:], owner.Fence)
	return n == 1, err
}

// Complete implements [Store].
func (s *postgres) Complete(ctx context.Context, id ID, owner Owner, c Completion) (owned bool, err error) {
	err = s.single(ctx, func(via session) error {
		return via.QueryRowContext(ctx, s.q.Complete, completionArgs(id, owner, c)...).Scan(&owned)
	})
	return owned, err
}

// Purge implements [Store].
func (s *postgres) Purge(ctx context.Context, limit int) (total int, err error) {
	for _, text := range []string{s.q.Purge, s.q.Expire} {
		n, err := s.change(ctx, text, limit)
		total += int(n)
		if err != nil {
			return total, fmt.Errorf("purge: %w", err)
		}
	}
	return total, nil
}
