package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// postgresNotesText is what is executed beside the way of a message that is handled
// at its first delivery.
type postgresNotesText struct {
	sameFingerprint, reopen, markDead                            string
	noteStart, charge, noteEnd, countFailure, keepErrors, forget string
	pruneIDs, pruneHandled, pruneOld                             string
}

func newPostgresNotesText(cfg oncemill.Config) postgresNotesText {
	return postgresNotesText{
		sameFingerprint: cfg.Expand(postgresSameFingerprint),
		reopen:          cfg.Expand(postgresReopen),
		markDead:        cfg.Expand(postgresMarkDead),
		noteStart:       cfg.Expand(postgresNoteStart),
		charge:          cfg.Expand(postgresCharge),
		noteEnd:         cfg.Expand(postgresNoteEnd),
		countFailure:    cfg.Expand(postgresCountFailure),
		keepErrors:      cfg.Expand(postgresKeepErrors),
		forget:          cfg.Expand(postgresForget),
		pruneIDs:        cfg.Expand(postgresPruneIDs),
		pruneHandled:    cfg.Expand(postgresPruneHandled),
		pruneOld:        cfg.Expand(postgresPruneOld),
	}
}

// A connection that is there answers, be it that the transaction is aborted.
func (s *postgresStore) gone(ctx context.Context, tx *sql.Tx) bool {
	_, err := tx.ExecContext(context.WithoutCancel(ctx), `select 1`)
	return sqlerr.Connection(err)
}

// Served by the primary key. The row is committed, and nothing changes its
// fingerprint.
const postgresSameFingerprint = `
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2`

func (s *postgresStore) sameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (same bool, err error) {
	err = tx.QueryRowContext(ctx, s.text.sameFingerprint, s.consumer, id, fingerprint).Scan(&same)
	if errors.Is(err, sql.ErrNoRows) { // pruned, or above READ COMMITTED too new to be seen
		return false, ErrBeingHandled
	}
	return same, err
}

// Served by the primary key. Two replays of a letter lock its row: one deletes it,
// the other finds none.
const (
	postgresPatience = `select set_config('lock_timeout', $1, true)`
	postgresReopen   = `
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead`
)

func (s *postgresStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) (bool, error) {
	_, err := tx.ExecContext(ctx, postgresPatience, s.patience)
	if err != nil {
		return false, fmt.Errorf("reopen: %w", err)
	}
	result, err := tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message)
	switch {
	case err == nil:
		n, err := result.RowsAffected()
		return n == 1, err
	case heldElsewhere(err):
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return false, fmt.Errorf("reopen: %w", err)
}

// Served by the primary key; the row is of this transaction.
const postgresMarkDead = `
update {{inbox}}
set dead = true
where consumer = $1
	and message_id = $2`

func (s *postgresStore) markDead(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, s.text.markDead, s.consumer, id)
	return err
}

// Served by the primary keys. The upsert locks its row, so starts that come at the
// same time count one after the other.
const (
	postgresNoteStart = `
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3::boolean))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = clock_timestamp()
returning starts > 1`
	postgresCharge = `
update {{inbox_failures}}
set alone = alone + 1
where consumer = $1
	and message_id = $2
returning alone`
	postgresNoteEnd = `
update {{inbox_failures}}
set starts = greatest(starts - 1, 0),
	alone = case when $3 then greatest(alone - 1, 0) else alone end,
	changed_at = clock_timestamp()
where consumer = $1
	and message_id = $2`
)

func (s *postgresStore) noteStart(ctx context.Context, id string, replay bool) (start, error) {
	noted := start{noted: true}
	err := s.db.QueryRowContext(ctx, s.text.noteStart, s.consumer, id, replay).Scan(&noted.suspect)
	if errors.Is(err, sql.ErrNoRows) {
		return start{}, nil // a duplicate
	}
	if err != nil {
		return start{}, err
	}
	return noted, nil
}

func (s *postgresStore) charge(ctx context.Context, id string) (alone int, err error) {
	err = s.db.QueryRowContext(ctx, s.text.charge, s.consumer, id).Scan(&alone)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil // handled meanwhile
	}
	return alone, err
}

func (s *postgresStore) noteEnd(ctx context.Context, id string, noted start) error {
	_, err := s.db.ExecContext(ctx, s.text.noteEnd, s.consumer, id, noted.charged)
	return err
}

// Served by the primary key. The first statement locks the row for the second.
const (
	postgresCountFailure = `
insert into {{inbox_failures}} as f (consumer, message_id, failures)
values ($1, $2, 1)
on conflict (consumer, message_id) do update
set failures = f.failures + 1,
	starts = case when $3 then greatest(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then greatest(f.alone - 1, 0) else f.alone end,
	changed_at = clock_timestamp()
returning failures, errors, clock_timestamp()`
	postgresKeepErrors = `
update {{inbox_failures}}
set errors = $3
where consumer = $1
	and message_id = $2`
)

func (s *postgresStore) recordFailure(ctx context.Context, id string, noted start, failure error) (rec record, err error) {
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return rec, err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	var kept string
	var now time.Time
	err = tx.QueryRowContext(ctx, s.text.countFailure, s.consumer, id, noted.noted, noted.charged).Scan(&rec.failures, &kept, &now)
	if err != nil {
		return rec, err
	}
	if kept, err = rec.add(kept, now, failure); err != nil {
		return rec, err
	}
	if _, err := tx.ExecContext(ctx, s.text.keepErrors, s.consumer, id, kept); err != nil {
		return rec, err
	}
	return rec, tx.Commit()
}

// Served by the primary key.
const postgresForget = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2`

func (s *postgresStore) forgetFailures(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, s.text.forget, s.consumer, id)
	return err
}

// Served by inbox_received and inbox_failures_changed, from their oldest end.
// Rows that another pruner has locked are left to it. An id of a dead letter
// stays.
const (
	postgresPruneIDs = `
delete from {{inbox}}
where ctid = any (array(
	select ctid
	from {{inbox}}
	where consumer = $1
		and received_at < clock_timestamp() - make_interval(secs => $2)
		and not dead
	order by received_at
	limit $3
	for update skip locked))`
	postgresPruneHandled = `
delete from {{inbox_failures}}
where ctid = any (array(
	select f.ctid
	from {{inbox_failures}} f
	where f.consumer = $1
		and exists (select from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
	limit $2
	for update of f skip locked))`
	postgresPruneOld = `
delete from {{inbox_failures}}
where ctid = any (array(
	select ctid
	from {{inbox_failures}}
	where consumer = $1
		and changed_at < clock_timestamp() - make_interval(secs => $2)
	order by changed_at
	limit $3
	for update skip locked))`
)

func (s *postgresStore) prune(ctx context.Context, retention time.Duration, limit int) (ids, notes int64, err error) {
	if ids, err = affected(s.db.ExecContext(ctx, s.text.pruneIDs, s.consumer, retention.Seconds(), limit)); err != nil {
		return ids, 0, err
	}
	of, err := affected(s.db.ExecContext(ctx, s.text.pruneHandled, s.consumer, limit))
	if err != nil {
		return ids, of, err
	}
	old, err := affected(s.db.ExecContext(ctx, s.text.pruneOld, s.consumer, retention.Seconds(), limit))
	return ids, of + old, err
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (s *postgresStore) now(ctx context.Context) (now time.Time, err error) {
	err = s.db.QueryRowContext(ctx, `select clock_timestamp()`).Scan(&now)
	return now, err
}

func (s *postgresStore) ping(ctx context.Context) error { return s.db.PingContext(ctx) }
