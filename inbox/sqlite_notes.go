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

// sqliteNotesText is what is executed beside the way of a message that is handled
// at its first delivery. There is one writer: that is why all of it is safe.
type sqliteNotesText struct {
	sameFingerprint, reopen, markDead                            string
	noteStart, charge, noteEnd, countFailure, keepErrors, forget string
	pruneIDs, pruneHandled, pruneOld                             string
}

func newSQLiteNotesText(cfg oncemill.Config) sqliteNotesText {
	return sqliteNotesText{
		sameFingerprint: cfg.Expand(sqliteSameFingerprint),
		reopen:          cfg.Expand(sqliteReopen),
		markDead:        cfg.Expand(sqliteMarkDead),
		noteStart:       cfg.Expand(sqliteNoteStart),
		charge:          cfg.Expand(sqliteCharge),
		noteEnd:         cfg.Expand(sqliteNoteEnd),
		countFailure:    cfg.Expand(sqliteCountFailure),
		keepErrors:      cfg.Expand(sqliteKeepErrors),
		forget:          cfg.Expand(sqliteForget),
		pruneIDs:        cfg.Expand(sqlitePruneIDs),
		pruneHandled:    cfg.Expand(sqlitePruneHandled),
		pruneOld:        cfg.Expand(sqlitePruneOld),
	}
}

// The database is a file: a connection to it is not lost.
func (s *sqliteStore) gone(context.Context, *sql.Tx) bool { return false }

// Served by the primary key.
const sqliteSameFingerprint = `
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2`

func (s *sqliteStore) sameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (same bool, err error) {
	err = tx.QueryRowContext(ctx, s.text.sameFingerprint, s.consumer, id, fingerprint).Scan(&same)
	return same, err
}

// Served by the primary key.
const sqliteReopen = `
delete from {{inbox}}
where consumer = $1
	and message_id = $2
	and dead = 1`

func (s *sqliteStore) reopen(ctx context.Context, tx *sql.Tx, id messageID) (bool, error) {
	n, err := affected(tx.ExecContext(ctx, s.text.reopen, id.consumer, id.message))
	if err != nil && sqlerr.Retryable(err) {
		return false, fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return n == 1, err
}

// Served by the primary key.
const sqliteMarkDead = `
update {{inbox}}
set dead = 1
where consumer = $1
	and message_id = $2`

func (s *sqliteStore) markDead(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, s.text.markDead, s.consumer, id)
	return err
}

// Served by the primary keys.
const (
	sqliteNoteStart = `
insert into {{inbox_failures}} as f (consumer, message_id, starts)
select $1, $2, 1
where not exists (select 1 from {{inbox}} i where i.consumer = $1 and i.message_id = $2 and not (i.dead and $3))
on conflict (consumer, message_id) do update
set starts = f.starts + 1,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
returning starts > 1`
	sqliteCharge = `
update {{inbox_failures}}
set alone = alone + 1
where consumer = $1
	and message_id = $2
returning alone`
	sqliteNoteEnd = `
update {{inbox_failures}}
set starts = max(starts - 1, 0),
	alone = case when $3 then max(alone - 1, 0) else alone end,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
where consumer = $1
	and message_id = $2`
)

func (s *sqliteStore) noteStart(ctx context.Context, id string, replay bool) (start, error) {
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

func (s *sqliteStore) charge(ctx context.Context, id string) (alone int, err error) {
	err = s.db.QueryRowContext(ctx, s.text.charge, s.consumer, id).Scan(&alone)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil // handled meanwhile
	}
	return alone, err
}

func (s *sqliteStore) noteEnd(ctx context.Context, id string, noted start) error {
	_, err := s.db.ExecContext(ctx, s.text.noteEnd, s.consumer, id, noted.charged)
	return err
}

// Served by the primary key.
const (
	sqliteCountFailure = `
insert into {{inbox_failures}} as f (consumer, message_id, failures)
values ($1, $2, 1)
on conflict (consumer, message_id) do update
set failures = f.failures + 1,
	starts = case when $3 then max(f.starts - 1, 0) else f.starts end,
	alone = case when $4 then max(f.alone - 1, 0) else f.alone end,
	changed_at = cast(unixepoch('subsec') * 1000000 as integer)
returning failures, errors, cast(unixepoch('subsec') * 1000000 as integer)`
	sqliteKeepErrors = `
update {{inbox_failures}}
set errors = $3
where consumer = $1
	and message_id = $2`
)

func (s *sqliteStore) recordFailure(ctx context.Context, id string, noted start, failure error) (rec record, err error) {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return rec, err
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	var kept string
	var now int64
	err = tx.QueryRowContext(ctx, s.text.countFailure, s.consumer, id, noted.noted, noted.charged).Scan(&rec.failures, &kept, &now)
	if err != nil {
		return rec, err
	}
	if kept, err = rec.add(kept, time.UnixMicro(now), failure); err != nil {
		return rec, err
	}
	if _, err := tx.ExecContext(ctx, s.text.keepErrors, s.consumer, id, kept); err != nil {
		return rec, err
	}
	return rec, tx.Commit()
}

// Served by the primary key.
const sqliteForget = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2`

func (s *sqliteStore) forgetFailures(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, s.text.forget, s.consumer, id)
	return err
}

// Served by inbox_received and inbox_failures_changed, from their oldest end, and
// by the primary keys. An id of a dead letter stays.
const (
	sqlitePruneIDs = `
delete from {{inbox}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox}}
		where consumer = $1
			and received_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
			and dead = 0
		order by received_at
		limit $3)`
	sqlitePruneHandled = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select f.message_id
		from {{inbox_failures}} f
		where f.consumer = $1
			and exists (select 1 from {{inbox}} i where i.consumer = f.consumer and i.message_id = f.message_id and not i.dead)
		limit $2)`
	sqlitePruneOld = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id in (
		select message_id
		from {{inbox_failures}}
		where consumer = $1
			and changed_at < cast(unixepoch('subsec') * 1000000 as integer) - $2
		order by changed_at
		limit $3)`
)

func (s *sqliteStore) prune(ctx context.Context, retention time.Duration, limit int) (ids, notes int64, err error) {
	if ids, err = affected(s.db.ExecContext(ctx, s.text.pruneIDs, s.consumer, retention.Microseconds(), limit)); err != nil {
		return ids, 0, err
	}
	of, err := affected(s.db.ExecContext(ctx, s.text.pruneHandled, s.consumer, limit))
	if err != nil {
		return ids, of, err
	}
	old, err := affected(s.db.ExecContext(ctx, s.text.pruneOld, s.consumer, retention.Microseconds(), limit))
	return ids, of + old, err
}

func (s *sqliteStore) now(ctx context.Context) (time.Time, error) {
	var micros int64
	err := s.db.QueryRowContext(ctx, `select cast(unixepoch('subsec') * 1000000 as integer)`).Scan(&micros)
	return time.UnixMicro(micros), err
}

func (s *sqliteStore) ping(ctx context.Context) error { return s.db.PingContext(ctx) }
