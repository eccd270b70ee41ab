package outboxstore

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgresScheduled is the SQL of scheduled messages.
type postgresScheduled struct{ insert, cancel, next, large, choose, move string }

func newPostgresScheduled(names database.Database) postgresScheduled {
	return postgresScheduled{
		insert: names.Expand(postgresSchedule), cancel: names.Expand(postgresCancel),
		next: names.Expand(postgresNextDue), large: names.Expand(postgresNextLarge), choose: names.Expand(postgresChooseDue), move: names.Expand(postgresMoveChosen),
	}
}

const (
	rowsPerSchedule = 8_000 // 64,000 of the protocol's 65,535 parameters
)

// The sequence is read in the order of the values, so messages of one call with the
// same due time keep the call's order.
const postgresSchedule = `insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at) values `

var postgresScheduleParts = [scheduleColumns + 1]string{
	"(", ", ", ", ", ", ", ", ", ", ",
	", case ", "::smallint when 1 then statement_timestamp() else timestamptz 'epoch' end + ", "::bigint * interval '1 microsecond')",
}

// One row for each cancelled message. The migrations define the function; its caller
// needs no right on the table.
const postgresCancel = `select from {{scheduled_cancel}}($1)`

const (
	// The first entry of the primary key behind $3 and $4, except those put aside, $1,
	// and those of keys that wait, $2.
	postgresNextDue = `
select (extract(epoch from s.deliver_at - clock_timestamp()) * 1000000)::bigint, octet_length(s.payload) + octet_length(s.metadata)
from {{scheduled}} s
where (s.deliver_at, s.seq) > ((select $3::timestamptz), (select $4::bigint))
	and s.seq not in (select unnest((select $1::bigint[])))
	and s.key not in (select unnest((select $2::text[])))
order by s.deliver_at, s.seq
limit 1`

	// The same, for due messages with more bytes than $5. Entries before it in the
	// index wait for a cancellation.
	postgresNextLarge = `
select octet_length(s.payload) + octet_length(s.metadata)
from {{scheduled}} s
where s.deliver_at <= (select clock_timestamp())
	and (s.deliver_at, s.seq) > ((select $3::timestamptz), (select $4::bigint))
	and s.seq not in (select unnest((select $1::bigint[])))
	and s.key not in (select unnest((select $2::text[])))
	and octet_length(s.payload) + octet_length(s.metadata) > $5
order by s.deliver_at, s.seq
limit 1`

	// Due rows come first in the index. The statistics of a table that fills and
	// empties do not show that, so the planner gets no other choice. Constraints are
	// checked when a row is moved, so that a refused row is identified.
	postgresMovePlan = `set local enable_seqscan = off; set local enable_bitmapscan = off; set local jit = off; set local datestyle = 'ISO'; set constraints all immediate`

	// Served by the primary key (deliver_at, seq), from $8 and $9 to $10 and $11. $1 is
	// the number of rows to look at, $12 to choose, $2 the byte budget, $3 keys that
	// wait already, $4 and $5 the least and the most bytes of a row, $6 those put
	// aside, $7 the only row to move, if it is not 0.
	//
	// Passed over are rows of another size, rows put aside, and rows that somebody is
	// cancelling, which are locked. So are the later rows of their keys: the
	// cancellation may be rolled back. A row that is not locked once it was read cannot
	// be cancelled before this commits. The choice is separate from the move, so that a
	// row that fails is identified. The last columns are the place of the last row that
	// was looked at.
	postgresChooseDue = `
with free as materialized (
	select s.deliver_at, s.seq, s.key, octet_length(s.payload) + octet_length(s.metadata) as bytes
	from {{scheduled}} s
	where s.deliver_at <= (select clock_timestamp())
		and (s.deliver_at, s.seq) > ((select $8::timestamptz), (select $9::bigint))
		and (s.deliver_at, s.seq) <= ((select $10::timestamptz), (select $11::bigint))
		and s.key not in (select unnest((select $3::text[])))
		and octet_length(s.payload) + octet_length(s.metadata) between $4 and $5
		and s.seq not in (select unnest((select $6::bigint[])))
		and ((select $7::bigint) = 0 or s.seq = (select $7::bigint))
	order by s.deliver_at, s.seq
	limit $1
	for update skip locked
), last as materialized (
	select deliver_at, seq from free order by deliver_at desc, seq desc limit 1
), held as materialized (
	select distinct on (s.key) s.key, s.deliver_at, s.seq
	from {{scheduled}} s
	where (s.deliver_at, s.seq) <= ((select deliver_at from last), (select seq from last))
		and s.key <> ''
		and s.key not in (select unnest((select $3::text[])))
		and s.seq not in (select seq from free)
	order by s.key, s.deliver_at, s.seq
), chosen as (
	select deliver_at, seq, key
	from (
		select deliver_at, seq, key,
			sum(bytes) over (order by deliver_at, seq rows between unbounded preceding and 1 preceding) as bytes_before
		from free
		where not exists (
			select
			from held h
			where h.key = free.key and (h.deliver_at, h.seq) < (free.deliver_at, free.seq)
		)
	) f
	where coalesce(bytes_before, 0) < $2
	order by deliver_at, seq
	limit $12
)
select array(select deliver_at::text from chosen order by deliver_at, seq), array(select seq from chosen order by deliver_at, seq),
	array(select key from chosen order by deliver_at, seq), array(select key from free intersect select key from held),
	coalesce((select deliver_at::text from last), ''), coalesce((select seq from last), 0)`

	// Ids are taken after the sort.
	postgresMoveChosen = `
with gone as (
	delete from {{scheduled}} s
	using unnest((select $1::timestamptz[]), (select $2::bigint[])) as c (deliver_at, seq)
	where s.deliver_at = c.deliver_at and s.seq = c.seq
	returning s.deliver_at, s.seq, s.lane, s.topic, s.message_id, s.key, s.payload, s.metadata
)
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
select lane, topic, message_id, key, payload, metadata
from gone
order by deliver_at, seq`
)

func (s *postgresStore) Schedule(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow) error {
	return scheduleRows(ctx, tx, rows, rowsPerSchedule, s.scheduled.insert, postgresScheduleParts)
}

func (s *postgresStore) Cancel(ctx context.Context, tx oncemill.ExecTx, messageID string) (int64, error) {
	return affected(tx.ExecContext(ctx, s.scheduled.cancel, messageID))
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (s *postgresStore) NextDue(ctx context.Context) (Due, error) {
	over := s.pace.leftOut()
	head, err := nextDue(s.db.QueryRowContext(ctx, s.scheduled.next, pq.Array(over.seqs), pq.Array(over.keys), over.after.at, over.after.seq))
	if err == nil && s.pace.retryIn(time.Now()) <= 0 {
		head.In = 0
	}
	return head, err
}

func nextDue(row *sql.Row) (head Due, err error) {
	var micros int64
	switch err := row.Scan(&micros, &head.Bytes); {
	case errors.Is(err, sql.ErrNoRows):
		return Due{In: moveIdle}, nil
	case err != nil:
		return Due{}, err
	}
	// Far in the future, the duration would overflow.
	head.In = time.Duration(min(micros, moveIdle.Microseconds())) * time.Microsecond
	return head, nil
}

// moveBeside is how long a call may take in addition to the statement that moves a
// large message. On a busy server the look for it takes long, too; a call with no time
// left would be repeated forever.
const moveBeside = 5 * time.Second

var moveLimits = shorttx.Limits{Lock: 500 * time.Millisecond, Statement: 3 * time.Second}

const mostBytes = math.MaxInt32 // of a row

// moveDue moves a batch. A message larger than a batch is moved alone, with more time,
// once it is the first one due or the others wait. Until then others pass it, except
// those of its key. A message that cannot be moved, for a reason of its own, is put
// aside and retried alone.
func (s *postgresStore) MoveDue(ctx context.Context, guard Guard, head Due) (Moved, error) {
	rows, bytes := s.pace.batch()
	alone := choice{rows: 1, bytes: bytes, least: bytes + 1, most: mostBytes, after: s.pace.leftOut().after, upTo: end}
	one, again := s.pace.retry(time.Now())
	after, upTo, inRound := s.pace.inRound(time.Now())
	large := head.Bytes > bytes && s.pace.tryLarge(time.Now())
	moved, err := Moved{}, error(nil)
	what := s.pace.takeTurn(again, inRound, large)
	switch what {
	case ofAside:
		only := choice{rows: 1, bytes: bytes, only: one.seq, most: mostBytes, after: beginning, upTo: end}
		moved, err = s.moveAlone(ctx, guard, only, one.bytes)
	case ofRound:
		round := choice{rows: rows, bytes: math.MaxInt64, most: mostBytes, after: after, upTo: upTo, apart: true}
		moved, err = s.goRound(ctx, guard, round)
	case ofLarge:
		moved, err = s.moveAlone(ctx, guard, alone, head.Bytes)
	}
	if moved.Limit > 0 {
		s.pace.turnAgain(what)
	}
	if err != nil || moved.Rows > 0 && what == ofLarge {
		return moved, err
	}
	others, err := s.moveSmall(ctx, guard, rows, bytes)
	others.Rows, others.Limit, others.Failed = others.Rows+moved.Rows, moved.Limit, others.Failed || moved.Failed
	if err != nil || others.Rows > 0 || others.Limit > 0 || !s.pace.tryLarge(time.Now()) {
		return others, err
	}
	over := s.pace.leftOut()
	found := s.db.QueryRowContext(ctx, s.scheduled.large, pq.Array(over.seqs), pq.Array(over.keys), over.after.at, over.after.seq, bytes)
	switch err := found.Scan(&head.Bytes); {
	case errors.Is(err, sql.ErrNoRows):
		return others, nil
	case err != nil:
		return others, err
	}
	alone.after = over.after
	moved, err = s.moveAlone(ctx, guard, alone, head.Bytes)
	moved.Failed = moved.Failed || others.Failed
	return moved, err
}

// moveAlone moves one message, with a time limit for its size.
func (s *postgresStore) moveAlone(ctx context.Context, guard Guard, c choice, bytes int64) (Moved, error) {
	limits := shorttx.Limits{Lock: moveLimits.Lock, Statement: s.pace.large(c.only, bytes)}
	if deadline, limited := ctx.Deadline(); limited && time.Until(deadline) < limits.Statement {
		return Moved{Limit: limits.Statement + moveBeside}, nil
	}
	begin := time.Now()
	moved, seen, err := s.move(ctx, limits, guard, c)
	switch {
	case err == nil && moved > 0:
		s.pace.movedAlone(c.only, bytes, time.Since(begin), limits.Statement)
		return Moved{Rows: moved}, nil
	case err == nil: // cancelled, or waits for another one of its key
		s.pace.forget(c.only)
		return Moved{}, nil
	case len(seen.chosen) == 1 && ofRow(ctx, err):
		s.putAside(ctx, seen.chosen[0], bytes, limits.Statement, false, err)
		return Moved{Failed: true}, nil
	case errors.Is(err, errKeysWait):
		s.leave(ctx, seen.last, err)
		return Moved{Failed: true}, nil
	}
	s.pace.notNow(c.only, time.Now())
	return Moved{}, s.othersGoOn(ctx, err)
}

// goRound continues the round, as far as time permits.
func (s *postgresStore) goRound(ctx context.Context, guard Guard, c choice) (Moved, error) {
	limits := shorttx.Limits{Lock: moveLimits.Lock, Statement: s.pace.large(0, 0)}
	if deadline, limited := ctx.Deadline(); limited && time.Until(deadline) < limits.Statement {
		return Moved{Limit: limits.Statement + moveBeside}, nil
	}
	moved, seen, err := s.move(ctx, limits, guard, c)
	switch {
	case err != nil:
		s.pace.roundLater(time.Now())
		return Moved{}, s.othersGoOn(ctx, err)
	case seen.last == (place{}):
		s.pace.roundOver(time.Now())
	default:
		s.pace.wentTo(seen.last)
	}
	return Moved{Rows: moved, Failed: true}, nil
}

// othersGoOn returns err if others cannot continue.
func (s *postgresStore) othersGoOn(ctx context.Context, err error) error {
	if ctx.Err() != nil || sqlerr.State(err) == "" {
		return err
	}
	s.log.WarnContext(ctx, "looking for a scheduled message failed; others go on", "error", err)
	return nil
}

// rowError is an error of the statement that moves rows.
type rowError struct{ error }

func (e *rowError) Unwrap() error { return e.error }

// ofRow reports whether a row may have caused an error: it takes too long, waits for
// locks, or is refused by the outbox or by a trigger on it. Errors of a server that
// serves nobody do not count.
func ofRow(ctx context.Context, err error) bool {
	state := sqlerr.State(err)
	if ctx.Err() != nil || len(state) != 5 || !errors.As(err, new(*rowError)) {
		return false
	}
	switch state[:2] {
	case "25", "28", "40", "53", "57": // transaction, role, retries, resources, operators
		return state == tookLong
	}
	return true
}

const tookLong = "57014"

func (s *postgresStore) putAside(ctx context.Context, r row, bytes int64, limit time.Duration, inRound bool, err error) {
	wait := s.pace.failed(r, bytes, limit, sqlerr.State(err) == tookLong, inRound, time.Now())
	others, due := s.pace.tell(time.Now())
	if due {
		s.log.ErrorContext(ctx, "scheduled message cannot be moved to the outbox; it and those of its key wait, trying again later",
			"seq", r.seq, "bytes", bytes, "limit", limit, "retry_in", wait, "others_since", others, "error", err)
	}
}

// moveSmall moves a batch of rows of at most the given bytes each, and adapts the batch
// to the time that takes. A batch that fails is made smaller, down to the row that is
// the cause.
func (s *postgresStore) moveSmall(ctx context.Context, guard Guard, rows int, bytes int64) (Moved, error) {
	limits := moveLimits
	if within := shorttx.Within(ctx); within.Statement < limits.Statement {
		limits.Statement = within.Statement // the server should report what is slow before the caller gives up
	}
	begin := time.Now()
	c := choice{rows: rows, bytes: bytes, most: bytes, after: s.pace.leftOut().after, upTo: end}
	moved, seen, err := s.move(ctx, limits, guard, c)
	if err != nil && ofRow(ctx, err) && sqlerr.State(err) != tookLong && len(seen.chosen) > 1 && time.Since(begin) < limits.Statement/2 {
		c.apart = true
		moved, seen, err = s.move(ctx, limits, guard, c)
	}
	switch {
	case err == nil:
		s.pace.took(time.Since(begin), limits.Statement)
		return Moved{Rows: moved, Failed: c.apart}, nil
	case errors.Is(err, errKeysWait):
		s.leave(ctx, seen.last, err)
		return Moved{Failed: true}, nil
	case ctx.Err() == nil && !ofRow(ctx, err) && !sqlerr.TimedOut(err), errors.Is(ctx.Err(), context.Canceled):
		return Moved{}, err
	case ofRow(ctx, err) && len(seen.chosen) == 1 && (rows == 1 || sqlerr.State(err) != tookLong):
		s.putAside(ctx, seen.chosen[0], 0, limits.Statement, false, err)
		return Moved{Failed: true}, nil
	case ctx.Err() != nil, !s.pace.slower():
		return Moved{}, err // the server is silent, or the batch cannot be smaller
	}
	s.log.WarnContext(ctx, "moving scheduled messages failed; moving fewer at a time", "rows", rows, "bytes", bytes, "error", err)
	return Moved{Failed: true}, nil
}

// choice selects the rows to move.
type choice struct {
	rows        int
	bytes       int64 // of all; the last row may be too large
	least, most int64 // bytes of each
	only        int64 // the only row to move; 0: all
	after, upTo place
	apart       bool // moved one by one; refused ones are put aside
}

// seen is what move has looked at.
type seen struct {
	chosen []row
	last   place // everything up to it was tried, or blocks nobody; the zero place if there was nothing
}

// errKeysWait means that more keys wait than a look passes over.
var errKeysWait = errors.New("too many keys of scheduled messages wait for transactions that cancel one, or for a message that cannot be moved")

// leave leaves to rounds the range in which more keys wait than a look passes over.
func (s *postgresStore) leave(ctx context.Context, upTo place, err error) {
	now := time.Now()
	s.pace.leave(upTo, now)
	if _, due := s.pace.tell(now); due {
		s.log.WarnContext(ctx, "scheduled messages up to this time are tried less often", "deliver_at", upTo.at, "error", err)
	}
}

// move moves the first due rows of a choice. It returns their number and what it has
// looked at, after an error as far as that is known.
func (s *postgresStore) move(ctx context.Context, limits shorttx.Limits, guard Guard, c choice) (moved int, looked seen, err error) {
	over := s.pace.leftOut()
	if c.only != 0 {
		over.seqs, over.keys = []int64{}, []string{}
	}
	waiting := over.keys
	for look := c.rows; ; look = min(2*look, moveRows) {
		var times, keys, held []string
		var seqs []int64
		var refused []refusal
		looked = seen{}
		_, err := s.guarded(ctx, limits, guard, func(tx *sql.Tx) (bool, error) {
			if _, err := tx.ExecContext(ctx, postgresMovePlan); err != nil {
				return false, err
			}
			found := tx.QueryRowContext(ctx, s.scheduled.choose, look, c.bytes, pq.Array(waiting), c.least, c.most, pq.Array(over.seqs), c.only,
				c.after.at, c.after.seq, c.upTo.at, c.upTo.seq, c.rows)
			err := found.Scan(pq.Array(&times), pq.Array(&seqs), pq.Array(&keys), pq.Array(&held), &looked.last.at, &looked.last.seq)
			if err != nil || len(seqs) == 0 {
				return false, err
			}
			for i := range seqs {
				looked.chosen = append(looked.chosen, row{place{times[i], seqs[i]}, keys[i]})
			}
			if c.apart {
				var tried int
				moved, tried, refused, err = s.moveApart(ctx, tx, looked.chosen)
				if err == nil && tried < len(looked.chosen) {
					looked.last = looked.chosen[tried-1].place
				}
				return true, err
			}
			n, err := affected(tx.ExecContext(ctx, s.scheduled.move, pq.Array(times), pq.Array(seqs)))
			moved = int(n)
			if err != nil {
				err = &rowError{err}
			}
			return true, err
		})
		for _, r := range refused {
			s.putAside(ctx, r.row, 0, limits.Statement, c.upTo != end, r.err)
		}
		// If all the first rows wait, others may not. A round continues behind them.
		if err != nil || moved > 0 || len(refused) > 0 || len(held) == 0 || c.only != 0 || c.upTo != end {
			return moved, looked, err
		}
		waiting = slices.Concat(waiting, held)
		if len(waiting)-len(over.keys) > s.pace.mostWaiting {
			return 0, looked, errKeysWait
		}
	}
}

// refusal is a message that the outbox refuses.
type refusal struct {
	row
	err error
}

// moveApart moves messages one by one, as many as time permits, so that only refused
// messages and those of their keys remain. It tries at least one.
func (s *postgresStore) moveApart(ctx context.Context, tx *sql.Tx, rows []row) (moved, tried int, refused []refusal, err error) {
	// A message that waits for others, in a trigger, must cost little.
	if _, err := tx.ExecContext(ctx, `set local lock_timeout = '50ms'`); err != nil {
		return 0, 0, nil, err
	}
	begin := time.Now()
	waiting := map[string]bool{}
	late := false
	for i, r := range rows {
		if late || i > 0 && time.Since(begin) > moveLimits.Statement/4 {
			break
		}
		tried++
		if waiting[r.key] {
			continue
		}
		if _, err := tx.ExecContext(ctx, `savepoint apart`); err != nil {
			return 0, 0, nil, err
		}
		n, err := affected(tx.ExecContext(ctx, s.scheduled.move, pq.Array([]string{r.at}), pq.Array([]int64{r.seq})))
		after := `release savepoint apart`
		switch {
		case err == nil:
			moved += int(n)
		case ofRow(ctx, &rowError{err}):
			refused = append(refused, refusal{r, err})
			waiting[r.key] = r.key != ""
			late = sqlerr.State(err) == tookLong
			after = `rollback to savepoint apart`
		default:
			return 0, 0, nil, err
		}
		if _, err := tx.ExecContext(ctx, after); err != nil {
			return 0, 0, nil, err
		}
	}
	return moved, tried, refused, nil
}
