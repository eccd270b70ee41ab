package outboxstore

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"strconv"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
)

const (
	// A deletion that skips locked rows waits only for table locks. The plain one gives
	// up sooner, since it mostly waits for a row.
	waitForRow   = 100 * time.Millisecond
	waitForTable = 500 * time.Millisecond

	// A batch takes some milliseconds.
	removeLimit = 4 * time.Second
)

// Remove locks rows in the order of their ids, so that two workers seldom deadlock.
func (s *postgres) Remove(ctx context.Context, rows []Ref, how Removing) (removed int, locked []Ref, err error) {
	if len(rows) == 0 {
		return 0, nil, nil
	}
	rows = slices.Clone(rows)
	slices.SortFunc(rows, func(a, b Ref) int { return cmp.Compare(a.ID, b.ID) })
	if !how.SkipLocked {
		removed, err = s.removeWith(ctx, textOf(how.Move, s.q.Move, s.q.Delete), removeArgs(rows)...)
		return removed, nil, err
	}
	var left []int64
	limits := shorttx.Limits{Lock: waitForTable, Statement: removeLimit}
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		text := textOf(how.Move, s.q.MoveUnlocked, s.q.DeleteUnlocked)
		return tx.QueryRowContext(ctx, text, removeArgs(rows)...).Scan(&removed, pq.Array(&left))
	})
	if err != nil {
		return 0, nil, err
	}
	for _, n := range left {
		locked = append(locked, rows[n-1])
	}
	return removed, locked, nil
}

func textOf(move bool, moving, deleting string) string {
	if move {
		return moving
	}
	return deleting
}

// removeWith executes a text that waits for locked rows.
func (s *postgres) removeWith(ctx context.Context, text string, args ...any) (removed int, err error) {
	limits := shorttx.Limits{Lock: waitForRow, Statement: removeLimit}
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		n, err := database.Affected(tx.ExecContext(ctx, text, args...))
		removed = int(n)
		return err
	})
	if err != nil {
		return 0, err
	}
	return removed, nil
}

// removeArgs encodes the four arrays as text: every driver sends a string for a
// parameter of any type. Times are microseconds, which are exact, and cheaper for both
// sides than dates.
func removeArgs(rows []Ref) []any {
	var lanes, ids, times []byte
	messageIDs := make([]string, len(rows))
	for i, r := range rows {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		lanes = strconv.AppendInt(append(lanes, sep), int64(r.Lane), 10)
		ids = strconv.AppendInt(append(ids, sep), r.ID, 10)
		times = strconv.AppendInt(append(times, sep), r.CreatedAt.UnixMicro(), 10)
		messageIDs[i] = r.MessageID
	}
	return []any{string(append(lanes, '}')), string(append(ids, '}')), pq.Array(messageIDs), string(append(times, '}'))}
}
