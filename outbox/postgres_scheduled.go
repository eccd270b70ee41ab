package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgresScheduled is the SQL of messages for later.
type postgresScheduled struct{ insert, cancel, next, move string }

func newPostgresScheduled(names oncemill.Config) postgresScheduled {
	return postgresScheduled{
		insert: names.Expand(postgresSchedule), cancel: names.Expand(postgresCancel),
		next: names.Expand(postgresNextDue), move: names.Expand(postgresMoveDue),
	}
}

const (
	rowsPerSchedule = 8_000 // 64,000 of the protocol's 65,535 parameters
	mostWaiting     = 10_000
)

// The sequence is read in the order of the values, so messages of one call and
// one time keep the call's order.
const postgresSchedule = `insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at) values `

var postgresScheduleParts = [scheduleColumns + 1]string{
	"(", ", ", ", ", ", ", ", ", ", ",
	", case ", "::smallint when 1 then statement_timestamp() else timestamptz 'epoch' end + ", "::bigint * interval '1 microsecond')",
}

// A row for each message that was taken back. The function is in the migrations;
// its caller needs no right on the table.
const postgresCancel = `select from {{scheduled_cancel}}($1)`

const (
	// The first entry of the primary key.
	postgresNextDue = `
select (extract(epoch from s.deliver_at - clock_timestamp()) * 1000000)::bigint, octet_length(s.payload) + octet_length(s.metadata)
from {{scheduled}} s
order by s.deliver_at, s.seq
limit 1`

	// What is due comes first in the index, which statistics of a table that fills
	// and empties do not tell: the planner gets no other choice.
	postgresMovePlan = `set local enable_seqscan = off; set local enable_bitmapscan = off; set local jit = off`

	// Served by the primary key (deliver_at, seq), from its start. $1 is the
	// number of rows, $2 the byte budget, $3 keys that wait already, $4 and $5 the
	// least and the most bytes of a row.
	//
	// Rows of another size, and those that somebody is cancelling, which are locked,
	// are passed over, and so are the later ones of their keys: the cancellation may
	// be rolled back. A row
	// that is not locked once it was read cannot be cancelled before this
	// commits. Ids are taken after the sort.
	postgresMoveDue = `
with free as materialized (
	select s.deliver_at, s.seq, s.key, octet_length(s.payload) + octet_length(s.metadata) as bytes
	from {{scheduled}} s
	where s.deliver_at <= (select clock_timestamp())
		and s.key not in (select unnest((select $3::text[])))
		and octet_length(s.payload) + octet_length(s.metadata) between $4 and $5
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
	select deliver_at, seq
	from (
		select deliver_at, seq,
			sum(bytes) over (order by deliver_at, seq rows between unbounded preceding and 1 preceding) as bytes_before
		from free
		where not exists (
			select
			from held h
			where h.key = free.key and (h.deliver_at, h.seq) < (free.deliver_at, free.seq)
		)
	) f
	where coalesce(bytes_before, 0) < $2
), gone as (
	delete from {{scheduled}} s
	using chosen c
	where s.deliver_at = c.deliver_at and s.seq = c.seq
	returning s.deliver_at, s.seq, s.lane, s.topic, s.message_id, s.key, s.payload, s.metadata
), moved as (
	insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
	select lane, topic, message_id, key, payload, metadata
	from gone
	order by deliver_at, seq
	returning id
)
select (select count(*) from moved), array(select key from held)`
)

func (s *postgresStore) schedule(ctx context.Context, tx oncemill.Tx, rows []scheduledRow) error {
	return scheduleRows(ctx, tx, rows, rowsPerSchedule, s.scheduled.insert, postgresScheduleParts)
}

func (s *postgresStore) cancel(ctx context.Context, tx oncemill.Tx, messageID string) (int64, error) {
	return affected(tx.ExecContext(ctx, s.scheduled.cancel, messageID))
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (s *postgresStore) nextDue(ctx context.Context) (due, error) {
	return nextDue(s.db.QueryRowContext(ctx, s.scheduled.next))
}

func nextDue(row *sql.Row) (head due, err error) {
	var micros int64
	switch err := row.Scan(&micros, &head.bytes); {
	case errors.Is(err, sql.ErrNoRows):
		return due{in: moveIdle}, nil
	case err != nil:
		return due{}, err
	}
	// Far ahead, the duration would overflow.
	head.in = time.Duration(min(micros, moveIdle.Microseconds())) * time.Microsecond
	return head, nil
}

// moveBeside is how long a call may take besides the statement that moves a large message.
// On a busy server the look for it takes long, too: one that had no time left would be
// repeated for ever.
const moveBeside = 5 * time.Second

var moveLimits = shorttx.Limits{Lock: time.Second, Statement: 3 * time.Second}

const mostBytes = math.MaxInt32 // of a row

// moveDue moves a batch. A message that is larger than a batch is moved alone, with
// more time, when it has become the first one that is due; until then, and while that
// fails, others pass it, but those of its key.
func (s *postgresStore) moveDue(ctx context.Context, guard guard, head due) (Moved, error) {
	rows, bytes := s.pace.batch()
	if begin := time.Now(); head.bytes > bytes && s.pace.tryLarge(begin) {
		limits := shorttx.Limits{Lock: moveLimits.Lock, Statement: s.pace.large(head.bytes)}
		call := limits.Statement + moveBeside
		if deadline, limited := ctx.Deadline(); limited && time.Until(deadline) < limits.Statement {
			moved, err := s.moveSmall(ctx, guard, rows, bytes)
			moved.Limit = call
			return moved, err
		}
		n, err := s.move(ctx, limits, guard, 1, bytes, bytes+1, mostBytes)
		switch {
		case err == nil && n > 0:
			s.pace.movedLarge(time.Since(begin))
			return Moved{Rows: n}, nil
		case err != nil && (ctx.Err() != nil || !sqlerr.TimedOut(err)):
			return Moved{}, err
		case err != nil:
			wait := s.pace.failedLarge(time.Now(), limits.Statement)
			s.log.ErrorContext(ctx, "scheduled message is too large to be moved in time; trying again later",
				"bytes", head.bytes, "limit", limits.Statement, "retry_in", wait, "error", err)
		}
	}
	return s.moveSmall(ctx, guard, rows, bytes)
}

// moveSmall moves a batch of rows of at most so many bytes each, and adapts the batch
// to how long that takes.
func (s *postgresStore) moveSmall(ctx context.Context, guard guard, rows int, bytes int64) (Moved, error) {
	limits := moveLimits
	if within := shorttx.Within(ctx); within.Statement < limits.Statement {
		limits = within // the server is to say what is slow, before the caller gives up
	}
	begin := time.Now()
	n, err := s.move(ctx, limits, guard, rows, bytes, 0, bytes)
	switch {
	case err == nil:
		s.pace.took(time.Since(begin), limits.Statement)
		return Moved{Rows: n}, nil
	case ctx.Err() == nil && sqlerr.State(err) != "57014", errors.Is(ctx.Err(), context.Canceled):
		return Moved{}, err
	case ctx.Err() != nil, !s.pace.slower():
		return Moved{}, err // the server is silent, or less is not possible
	}
	s.log.WarnContext(ctx, "moving scheduled messages takes too long; moving fewer at a time", "rows", rows, "bytes", bytes, "error", err)
	return Moved{}, nil
}

// move moves the first rows that are due, of a size.
func (s *postgresStore) move(ctx context.Context, limits shorttx.Limits, guard guard, rows int, bytes, least, most int64) (moved int, err error) {
	var waiting []string
	for {
		var held []string
		_, err := s.guarded(ctx, limits, guard, func(tx *sql.Tx) (bool, error) {
			if _, err := tx.ExecContext(ctx, postgresMovePlan); err != nil {
				return false, err
			}
			row := tx.QueryRowContext(ctx, s.scheduled.move, rows, bytes, pq.Array(orEmpty(waiting)), least, most)
			return true, row.Scan(&moved, pq.Array(&held))
		})
		// Where all that came first waits, others may not.
		if err != nil || moved > 0 || len(held) == 0 {
			return moved, err
		}
		waiting = slices.Concat(waiting, held)
		if len(waiting) > mostWaiting {
			return 0, fmt.Errorf("%d keys of scheduled messages wait for transactions that cancel one", len(waiting))
		}
	}
}

// pace is how many scheduled messages are moved at a time.
type pace struct {
	mu         sync.Mutex // guards what follows
	halvings   int        // of the batch
	largeLimit time.Duration
	largeWait  time.Duration
	largeAt    time.Time // when a large message may be tried again
}

const (
	mostHalvings     = 11 // one row
	shortestLargeTry = 10 * time.Second
	longestLargeTry  = 10 * time.Minute

	// A large message has the time that its size needs on a slow disk, less than ten
	// seconds: the connection may lead nowhere. It has more when the server has said
	// that this was not enough.
	largeBytesPerSecond = 20 << 20
	mostLargeLimit      = time.Minute
)

// batch returns the rows and bytes of a batch.
func (p *pace) batch() (rows int, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(1, moveRows>>p.halvings), moveBytes >> p.halvings
}

// slower halves the batch, and reports whether that is possible.
func (p *pace) slower() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.halvings == mostHalvings {
		return false
	}
	p.halvings++
	return true
}

// took doubles the batch after one that took a small part of its time.
func (p *pace) took(elapsed, limit time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if elapsed < limit/8 {
		p.halvings = max(0, p.halvings-1)
	}
}

func (p *pace) tryLarge(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !now.Before(p.largeAt)
}

// large returns how long the statement may take that moves a message of so many bytes.
func (p *pace) large(bytes int64) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	needs := moveLimits.Statement + time.Duration(bytes)*time.Second/largeBytesPerSecond
	return min(max(needs, p.largeLimit), mostLargeLimit)
}

func (p *pace) movedLarge(took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.largeLimit, p.largeWait, p.largeAt = 2*took, 0, time.Time{}
}

// failedLarge notes that so much time was not enough.
func (p *pace) failedLarge(now time.Time, limit time.Duration) (wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if limit < mostLargeLimit {
		p.largeLimit, p.largeWait = 2*limit, shortestLargeTry
	} else {
		p.largeWait = min(max(2*p.largeWait, shortestLargeTry), longestLargeTry)
	}
	p.largeAt = now.Add(p.largeWait)
	return p.largeWait
}
