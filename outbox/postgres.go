package outbox

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

type postgresStore struct {
	db      *sql.DB
	history time.Duration // 0: none
	ask     bool          // Config.Archive decides what is removed
	log     *slog.Logger
	names   oncemill.Config

	insertHead, insertOne string
	readText              string
	removeText, moveText  string
	checkText, repairText string
	upkeep                postgresUpkeep
	scheduled             postgresScheduled
	past                  postgresHistory
	ring                  patience
}

func newPostgresStore(db *sql.DB, names oncemill.Config, history time.Duration, ask bool, log *slog.Logger) *postgresStore {
	s := &postgresStore{
		db: db, history: history, ask: ask, log: log, names: names,
		insertHead: names.Expand(postgresInsert),
		readText:   names.Expand(postgresRead),
		removeText: names.Expand(postgresRemove),
		moveText:   names.Expand(postgresMove),
		checkText:  names.Expand(postgresCheck),
		repairText: names.Expand(postgresRepair),
		upkeep:     newPostgresUpkeep(names),
		scheduled:  newPostgresScheduled(names),
		past:       newPostgresHistory(names),
	}
	s.insertOne = s.insertHead + valuesText(1)
	return s
}

// Ids come from the sequence in the order of the values, so the order of the
// call is the order of the rows.
const (
	postgresInsert   = `insert into {{outbox}} (lane, topic, message_id, key, payload, metadata) values `
	insertColumns    = 6
	rowsPerInsert    = 10_000 // 60,000 of the protocol's 65,535 parameters
	sqliteRowsInsert = 100    // in process: a statement costs no round trip, and binding is quadratic
)

// valuesText returns ($1, ..., $6), ($7, ...) for n rows.
func valuesText(n int) string {
	var b strings.Builder
	b.Grow(n * insertColumns * 7)
	for i := range n * insertColumns {
		switch {
		case i == 0:
			b.WriteByte('(')
		case i%insertColumns == 0:
			b.WriteString("), (")
		default:
			b.WriteString(", ")
		}
		b.WriteByte('$')
		b.WriteString(strconv.Itoa(i + 1))
	}
	b.WriteByte(')')
	return b.String()
}

func insertArgs(rows []Row) []any {
	args := make([]any, 0, len(rows)*insertColumns)
	for _, r := range rows {
		args = append(args, r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata)
	}
	return args
}

func (s *postgresStore) insert(ctx context.Context, tx oncemill.Tx, rows []Row) error {
	return insertRows(ctx, tx, rows, rowsPerInsert, s.insertHead, s.insertOne)
}

func insertRows(ctx context.Context, tx oncemill.Tx, rows []Row, most int, head, one string) error {
	for chunk := range slices.Chunk(rows, most) {
		text := one
		if len(chunk) > 1 {
			text = head + valuesText(len(chunk))
		}
		if _, err := tx.ExecContext(ctx, text, insertArgs(chunk)...); err != nil {
			return err
		}
	}
	return nil
}

// Served by the primary keys (lane, id) of the ring's partitions, merged: a scan
// of each lane from its start that stops after $2 rows. $3 is the byte budget of
// a lane, $4 the known ids, $5 the busy keys.
//
// Times come as microseconds: a double holds the seconds of this millennium to a
// quarter of one, so rounding is exact.
//
// The snapshot is the statement's own, so every row that was committed before is
// seen; among the rows of one key, whose producers serialise, a visible row
// implies that every earlier one is visible or gone.
//
// Planned at each execution (an unnamed statement): a plan kept from a time when
// the table was empty scans and sorts. The arrays stand behind sub-selects, so
// that planning does not weigh each element (36 ms with 4,000 known ids), and
// "not in" is a hashed subplan on every version.
//
// The limit stands there twice. The inner one hides its number: where that is
// above the rows that old statistics promise of a lane, the planner would fetch
// the whole lane and sort it. The outer one shows it: without it the estimate is
// a tenth of the lane, and a large backlog makes the planner compile the
// statement (JIT) at each execution. One condition in place of two halves the
// estimate for the same reason.
const postgresRead = `
select m.lane, m.id, m.topic, m.message_id, m.key, m.payload, m.metadata,
	(date_part('epoch', m.created_at) * 1000000)::bigint
from unnest($1::smallint[]) as l (lane)
cross join lateral (
	select *
	from (
		select f.*,
			sum(octet_length(f.payload) + octet_length(f.metadata))
				over (rows between unbounded preceding and 1 preceding) as bytes_before
		from (
			select *
			from (
				select o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
				from {{outbox}} o
				where o.lane = l.lane
					and case
						when o.id in (select unnest((select $4::bigint[]))) then false
						else o.key not in (select unnest((select $5::text[])))
					end
				order by o.id
				limit (select $2::bigint)
			) h
			limit $2
		) f
	) w
	where coalesce(w.bytes_before, 0) < $3
) m`

func (s *postgresStore) read(ctx context.Context, req ReadRequest) ([]Row, error) {
	lanes := make([]int64, len(req.Lanes))
	for i, l := range req.Lanes {
		lanes[i] = int64(l)
	}
	rows, err := s.db.QueryContext(ctx, s.readText,
		pq.Array(lanes), req.Rows, req.Bytes, pq.Array(orEmpty(req.Known)), pq.Array(orEmpty(req.Busy)))
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var out []Row
	for rows.Next() {
		var r Row
		var micros int64
		if err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &micros); err != nil {
			return nil, fmt.Errorf("read lanes: %w", err)
		}
		r.CreatedAt = time.UnixMicro(micros).UTC()
		out = append(out, r)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	return out, nil
}

// orEmpty keeps pq.Array from sending NULL for an empty list.
func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// Served by the primary keys (lane, id); the repeated partition expression lets
// the executor go to the one partition. Rows are locked in the order of the
// arrays, which are sorted by id; two workers that meet all the same, after a
// takeover, get 40P01, and the caller tries again. The sub-selects hide the
// length of the arrays from the planner, which would scan and hash the whole
// table for a few thousand rows (90 us a row instead of 2).
const (
	postgresRemove = `
delete from {{outbox}} o
using unnest(
	(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
) as c (lane, id, message_id, created_micros)
where o.lane = c.lane
	and o.id = c.id
	and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
	and o.message_id = c.message_id
	and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'`

	postgresMove = `
with gone as (` + postgresRemove + `
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)
insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
from gone`
)

func (s *postgresStore) remove(ctx context.Context, rows []Ref) (missed int, err error) {
	if len(rows) == 0 {
		return 0, nil
	}
	args := removeArgs(rows)
	var broken error
	if s.history > 0 {
		_, err := s.db.ExecContext(ctx, s.moveText, args...)
		switch {
		case err == nil:
			return 0, nil
		case ctx.Err() != nil || sqlerr.Connection(err) || sqlerr.Retryable(err):
			return 0, fmt.Errorf("move to history: %w", err)
		}
		broken = err // the history must never stop delivery
	}
	result, err := s.db.ExecContext(ctx, s.removeText, args...)
	if err != nil {
		return 0, fmt.Errorf("delete confirmed: %w", err)
	}
	if broken == nil {
		return 0, nil
	}
	removed, err := result.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("delete confirmed: %w", err)
	}
	return reportMissed(ctx, s.log, removed, broken), nil
}

// reportMissed logs what a broken history has missed.
func reportMissed(ctx context.Context, log *slog.Logger, removed int64, broken error) (missed int) {
	if removed > 0 {
		log.ErrorContext(ctx, "delivered messages are removed without being kept in the history", "rows", removed, "error", broken)
	}
	return int(removed)
}

// removeArgs writes the four arrays as text: every driver sends a string for a
// parameter of any type. Times go as microseconds, which are exact, and cheaper
// for both sides than dates.
func removeArgs(rows []Ref) []any {
	rows = slices.Clone(rows)
	slices.SortFunc(rows, func(a, b Ref) int { return cmp.Compare(a.ID, b.ID) })
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

// The highest id of each lane is one probe of an index, and so is that of each
// day of the history.
const postgresHighest = `
select greatest(
	(select coalesce(max(m.id), 0)
		from generate_series(0, 31) as l (lane)
		cross join lateral (select o.id from {{outbox}} o where o.lane = l.lane order by o.id desc limit 1) m),
	(select coalesce(max(h.id), 0) from {{outbox_history}} h))`

const (
	postgresCheck = `
select
	(select s.last_value - case when s.is_called then 0 else 1 end from {{outbox_id}} s),
	(select q.seqcache from pg_sequence q where q.seqrelid = '{{outbox_id}}'::regclass),
	(` + postgresHighest + `)`

	// Writers hold row exclusive, which this lock excludes; readers go on.
	postgresLockWriters = `lock table {{outbox}} in share row exclusive mode`

	postgresRepair = `
select setval('{{outbox_id}}', greatest((` + postgresHighest + `), (select last_value from {{outbox_id}})), true)`
)

func (s *postgresStore) check(ctx context.Context) error {
	var last, cache, highest int64
	if err := s.db.QueryRowContext(ctx, s.checkText).Scan(&last, &cache, &highest); err != nil {
		return fmt.Errorf("check id sequence: %w", err)
	}
	if cache > 1 {
		return fmt.Errorf("%w (cache %d)", ErrSequenceCached, cache)
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id in use %d)", ErrSequenceBehind, last, highest)
	}
	return nil
}

func (s *postgresStore) repairSequence(ctx context.Context) (last int64, err error) {
	// READ COMMITTED: the highest id is to be looked up after the lock.
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if _, err := tx.ExecContext(ctx, s.names.Expand(postgresLockWriters)); err != nil {
		return 0, fmt.Errorf("repair sequence: lock writers out: %w", err)
	}
	if err := tx.QueryRowContext(ctx, s.repairText).Scan(&last); err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return 0, fmt.Errorf("repair sequence: commit: %w", err)
	}
	return last, nil
}
