package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
)

type postgresStore struct {
	db      *sql.DB
	history time.Duration // 0: none
	ask     bool          // Config.Archive decides what is removed
	log     *slog.Logger
	names   oncemill.Config

	insertHead, insertOne string
	readText, readBulky   string
	removeText, moveText  string
	sweep                 [4]postgresSweep // by the partition of the ring
	checkText, repairText string
	lastText              string
	upkeep                postgresUpkeep
	scheduled             postgresScheduled
	past                  postgresHistory
	ring                  patience
	toll                  toll
}

func newPostgresStore(db *sql.DB, names oncemill.Config, history time.Duration, ask bool, log *slog.Logger) *postgresStore {
	s := &postgresStore{
		db: db, history: history, ask: ask, log: log, names: names,
		insertHead: names.Expand(postgresInsert),
		readText:   names.Expand(postgresRead),
		readBulky:  names.Expand(postgresReadBulky),
		removeText: names.Expand(postgresRemove),
		moveText:   names.Expand(postgresMove),
		checkText:  names.Expand(postgresCheck),
		repairText: names.Expand(postgresRepair),
		lastText:   names.Expand(postgresLast),
		upkeep:     newPostgresUpkeep(names),
		scheduled:  newPostgresScheduled(names),
		past:       newPostgresHistory(names),
	}
	s.insertOne = s.insertHead + valuesText(1)
	for i := range s.sweep {
		s.sweep[i] = newPostgresSweep(names, i)
	}
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

// The highest id of each lane is one probe of an index, and so is that of each
// day of the history.
const postgresHighest = `
select greatest(
	(select coalesce(max(m.id), 0)
		from generate_series(0, 31) as l (lane)
		cross join lateral (select o.id from {{outbox}} o where o.lane = l.lane order by o.id desc limit 1) m),
	(select coalesce(max(h.id), 0) from {{outbox_history}} h))`

const (
	postgresLast = `select s.last_value - case when s.is_called then 0 else 1 end from {{outbox_id}} s`

	postgresCheck = `
select
	(` + postgresLast + `),
	(select q.seqcache from pg_sequence q where q.seqrelid = '{{outbox_id}}'::regclass),
	(` + postgresHighest + `),
	coalesce(pg_sequence_last_value(pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass), 0) < (` + postgresScheduledSeen + `),
	pg_is_in_recovery(),
	current_setting('transaction_read_only')::boolean`

	// Scheduled messages of one time are in the order of their own sequence, and
	// have to differ in it. Both ends of the primary key tell enough of the highest
	// one; no index serves it.
	postgresScheduledSeen = `
select coalesce(max(e.seq), 0)
from (
	(select s.seq from {{scheduled}} s order by s.deliver_at, s.seq limit 100)
	union all
	(select s.seq from {{scheduled}} s order by s.deliver_at desc, s.seq desc limit 100)
) e`

	// Writers hold row exclusive, which this lock excludes; readers go on.
	postgresLockWriters = `lock table {{outbox}}, {{scheduled}} in share row exclusive mode`

	// A scan of the whole table, unless nothing is scheduled.
	postgresRepairScheduled = `
select setval(q.seq, greatest((select coalesce(max(s.seq), 1) from {{scheduled}} s), pg_sequence_last_value(q.seq)), true)
from (select pg_get_serial_sequence('{{scheduled}}', 'seq')::regclass as seq) q`

	postgresRepair = `
select setval('{{outbox_id}}', greatest((` + postgresHighest + `), (select last_value from {{outbox_id}}), $1), true)`
)

func (s *postgresStore) check(ctx context.Context) error {
	var last, cache, highest int64
	var later, standby, readOnly bool
	if err := s.db.QueryRowContext(ctx, s.checkText).Scan(&last, &cache, &highest, &later, &standby, &readOnly); err != nil {
		return fmt.Errorf("check id sequence: %w", err)
	}
	switch {
	case standby:
		return fmt.Errorf("%w (it is a standby)", ErrReadOnly)
	case readOnly:
		return fmt.Errorf("%w (default_transaction_read_only is on)", ErrReadOnly)
	}
	if cache > 1 {
		return fmt.Errorf("%w (cache %d)", ErrSequenceCached, cache)
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id in use %d)", ErrSequenceBehind, last, highest)
	}
	if later {
		return fmt.Errorf("%w (that of the scheduled messages)", ErrSequenceBehind)
	}
	return nil
}

func (s *postgresStore) lastID(ctx context.Context) (last int64, err error) {
	if err := s.db.QueryRowContext(ctx, s.lastText).Scan(&last); err != nil {
		return 0, fmt.Errorf("read id sequence: %w", err)
	}
	return last, nil
}

func (s *postgresStore) repairSequence(ctx context.Context, floor int64) (last int64, err error) {
	// READ COMMITTED: the highest id is to be looked up after the lock.
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	if _, err := tx.ExecContext(ctx, s.names.Expand(postgresLockWriters)); err != nil {
		return 0, fmt.Errorf("repair sequence: lock writers out: %w", err)
	}
	if err := tx.QueryRowContext(ctx, s.repairText, floor).Scan(&last); err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	if _, err := tx.ExecContext(ctx, s.names.Expand(postgresRepairScheduled)); err != nil {
		return 0, fmt.Errorf("repair sequence of scheduled messages: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return 0, fmt.Errorf("repair sequence: commit: %w", err)
	}
	return last, nil
}
