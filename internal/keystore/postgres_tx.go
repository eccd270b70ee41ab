package keystore

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Begin implements [Store].
func (s *postgres) Begin(ctx context.Context, isolation sql.IsolationLevel) (*boundtx.Tx, error) {
	return s.begin(ctx, &sql.TxOptions{Isolation: isolation})
}

// Seal implements [Store].
func (s *postgres) Seal(ctx context.Context, tx *sql.Tx, limits SealLimits) error {
	lock := "" // leaves lock_timeout unchanged
	if limits.Lock > 0 {
		lock = milliseconds(limits.Lock)
	}
	var nothing string
	return s.prepared.rowIn(ctx, tx, s.q.Seal, milliseconds(limits.Idle), lock).Scan(&nothing)
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) + "ms" }

// SealClaim implements [Store].
func (*postgres) SealClaim(context.Context, *sql.Tx, ID, Owner) (owned, enforced bool, err error) {
	return true, true, nil
}

// Finish implements [Store]. Above READ COMMITTED, a claim that was taken over fails with
// a serialization failure.
func (s *postgres) Finish(ctx context.Context, tx *sql.Tx, id ID, owner Owner, c Completion) (owned bool, err error) {
	err = s.prepared.rowIn(ctx, tx, s.q.Finish, completionArgs(id, owner, c)...).Scan(&owned)
	return owned, err
}

// FinishAll implements [Store].
func (s *postgres) FinishAll(ctx context.Context, tx *sql.Tx, all []Completed) (stale []int, err error) {
	rows, err := s.prepared.rowsIn(ctx, tx, s.q.FinishGroup, finishGroupArgs(all)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // Err returns what went wrong
	for rows.Next() {
		var position int
		if err := rows.Scan(&position); err != nil {
			return nil, err
		}
		stale = append(stale, position-1)
	}
	return stale, rows.Err()
}

func finishGroupArgs(all []Completed) []any {
	n := len(all)
	ids, owners, responses := make([][]byte, n), make([][]byte, n), make([][]byte, n)
	fences, states, statuses, retentions, forgets := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	large, locations, resources := make([]bool, n), make([]string, n), make([]string, n)
	for i := range all {
		c := &all[i]
		ids[i], owners[i], fences[i] = c.ID[:], c.Owner.Token[:], c.Owner.Fence
		states[i], statuses[i], responses[i], large[i] = int64(c.State), int64(c.Status), c.Response, c.Large
		locations[i], resources[i] = c.Location, c.ResourceID
		retentions[i], forgets[i] = c.Retention.Microseconds(), (c.Retention + c.Refuse).Microseconds()
	}
	return []any{
		pq.Array(ids), pq.Array(owners), pq.Array(fences), pq.Array(states), pq.Array(statuses), pq.Array(responses), pq.Array(large),
		pq.Array(locations), pq.Array(resources), pq.Array(retentions), pq.Array(forgets),
	}
}

const (
	// foreignKeyViolation is the SQLSTATE of a commit that the seal refused.
	foreignKeyViolation = "23503"

	// sealConstraint is the foreign key that such a commit violates. The error message
	// contains the name, in the quotation marks of its language.
	sealConstraint = "idempotency_ended_by_handler"
)

// AfterFailure implements [Store]. PostgreSQL never ends a transaction on its own, and
// refuses everything in it after an error. Only the seal reports an attempt to commit.
func (*postgres) AfterFailure(_ context.Context, _ *sql.Tx, _ ID, err error) TxState {
	if sqlerr.State(err) == foreignKeyViolation && strings.Contains(err.Error(), sealConstraint) {
		return TxSealed
	}
	return TxOpen
}

// Aborted implements [Store].
func (s *postgres) Aborted(ctx context.Context, tx *sql.Tx) bool {
	_, err := tx.ExecContext(ctx, s.q.Check)
	return err != nil
}
