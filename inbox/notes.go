package inbox

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// notes is the part of a store beside the way of a message that is handled at its first
// delivery. Databases differ in its texts alone.
type notes struct {
	db       *sql.DB
	consumer string
	own      *sql.TxOptions // of transactions that have nothing to do with a handler
	text     notesText
}

// notesText is what is executed. Texts of the same name take the same arguments; times
// are microseconds.
type notesText struct {
	sameFingerprint, reopen, markDead                            string
	noteStart, charge, noteEnd, countFailure, keepErrors, forget string
	pruneIDs, pruneHandled, pruneOld                             string
	advance, sequence                                            string
	now                                                          string
}

// Texts that are the same everywhere. All are served by the primary keys.
const (
	// On PostgreSQL the row is committed, and nothing changes its fingerprint.
	notesSameFingerprint = `
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2`

	// The upsert locks the row of the key, or waits for the transaction that does, so
	// one message of a key at a time is between here and its commit, whichever process
	// it is in. The statement after it sees what this one was decided by: nobody changes
	// a locked row.
	notesAdvance = `
insert into {{inbox_sequences}} as s (consumer, key, seq)
values ($1, $2, $3)
on conflict (consumer, key) do update
set seq = excluded.seq
where s.seq + 1 = excluded.seq
	or $4 and s.seq < excluded.seq
returning seq`
	notesSequence = `
select seq
from {{inbox_sequences}}
where consumer = $1
	and key = $2`

	notesCharge = `
update {{inbox_failures}}
set alone = alone + 1
where consumer = $1
	and message_id = $2
returning alone`
	notesKeepErrors = `
update {{inbox_failures}}
set errors = $3
where consumer = $1
	and message_id = $2`
	notesForget = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2`
)

// complete adds what is the same everywhere, and names the tables.
func (t notesText) complete(cfg oncemill.Config) notesText {
	t.sameFingerprint, t.advance, t.sequence = notesSameFingerprint, notesAdvance, notesSequence
	t.charge, t.keepErrors, t.forget = notesCharge, notesKeepErrors, notesForget
	for _, text := range []*string{
		&t.sameFingerprint, &t.reopen, &t.markDead,
		&t.noteStart, &t.charge, &t.noteEnd, &t.countFailure, &t.keepErrors, &t.forget,
		&t.pruneIDs, &t.pruneHandled, &t.pruneOld,
		&t.advance, &t.sequence,
	} {
		*text = cfg.Expand(*text)
	}
	return t
}

func (n *notes) sameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (same bool, err error) {
	err = tx.QueryRowContext(ctx, n.text.sameFingerprint, n.consumer, id, fingerprint).Scan(&same)
	if errors.Is(err, sql.ErrNoRows) { // pruned, or above READ COMMITTED too new to be seen
		return false, ErrBeingHandled
	}
	return same, err
}

func (n *notes) markDead(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, n.text.markDead, n.consumer, id)
	return err
}

func (n *notes) advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (place, error) {
	var seen int64
	err := tx.QueryRowContext(ctx, n.text.advance, n.consumer, key, seq, skip).Scan(&seen)
	if err == nil {
		return nextInLine, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return 0, err
	}
	if err := tx.QueryRowContext(ctx, n.text.sequence, n.consumer, key).Scan(&seen); err != nil {
		return 0, err
	}
	if seq <= seen {
		return outdated, nil
	}
	return early, nil
}

func (n *notes) noteStart(ctx context.Context, id string, replay bool) (start, error) {
	noted := start{noted: true}
	err := n.db.QueryRowContext(ctx, n.text.noteStart, n.consumer, id, replay).Scan(&noted.suspect)
	if errors.Is(err, sql.ErrNoRows) {
		return start{}, nil // a duplicate
	}
	if err != nil {
		return start{}, err
	}
	return noted, nil
}

func (n *notes) charge(ctx context.Context, id string) (alone int, err error) {
	err = n.db.QueryRowContext(ctx, n.text.charge, n.consumer, id).Scan(&alone)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil // handled meanwhile
	}
	return alone, err
}

func (n *notes) noteEnd(ctx context.Context, id string, noted start) error {
	_, err := n.db.ExecContext(ctx, n.text.noteEnd, n.consumer, id, noted.charged)
	return err
}

func (n *notes) recordFailure(ctx context.Context, id string, noted start, failure error) (rec record, err error) {
	tx, err := n.db.BeginTx(ctx, n.own)
	if err != nil {
		return rec, sqlerr.OfBegin(err)
	}
	defer tx.Rollback() //nolint:errcheck // a no-op after the commit
	var kept string
	var now int64
	err = tx.QueryRowContext(ctx, n.text.countFailure, n.consumer, id, noted.noted, noted.charged).Scan(&rec.failures, &kept, &now)
	if err != nil {
		return rec, err
	}
	if kept, err = rec.add(kept, time.UnixMicro(now), failure); err != nil {
		return rec, err
	}
	if _, err := tx.ExecContext(ctx, n.text.keepErrors, n.consumer, id, kept); err != nil {
		return rec, err
	}
	return rec, tx.Commit()
}

func (n *notes) forgetFailures(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, n.text.forget, n.consumer, id)
	return err
}

func (n *notes) prune(ctx context.Context, retention time.Duration, limit int) (ids, notes int64, err error) {
	if ids, err = affected(n.db.ExecContext(ctx, n.text.pruneIDs, n.consumer, retention.Microseconds(), limit)); err != nil {
		return ids, 0, err
	}
	of, err := affected(n.db.ExecContext(ctx, n.text.pruneHandled, n.consumer, limit))
	if err != nil {
		return ids, of, err
	}
	old, err := affected(n.db.ExecContext(ctx, n.text.pruneOld, n.consumer, retention.Microseconds(), limit))
	return ids, of + old, err
}

func affected(result sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (n *notes) now(ctx context.Context) (time.Time, error) {
	var micros int64
	err := n.db.QueryRowContext(ctx, n.text.now).Scan(&micros)
	return time.UnixMicro(micros), err
}

func (n *notes) ping(ctx context.Context) error { return n.db.PingContext(ctx) }
