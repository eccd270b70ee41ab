package inbox

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

// notes is the part of a store that a message does not need if it is handled at its first
// delivery. Databases differ only in the SQL texts.
type notes struct {
	db       *sql.DB
	consumer string
	sqlite   bool // writes need their turn
	text     notesText
}

// notesText holds the SQL texts. Texts of the same name take the same arguments; times are
// in microseconds.
type notesText struct {
	sameFingerprint, reopen, markDead                                       string
	noteStart, charge, discharge, noteEnd, countFailure, keepErrors, forget string
	pruneIDs, pruneHandled, pruneOld                                        string
	advance, sequence, retried                                              string
	countRefused                                                            string
	now                                                                     string
}

// SQL texts that are the same on all databases. All are served by the primary keys.
const (
	// On PostgreSQL the row is committed, and its fingerprint never changes.
	notesSameFingerprint = `
select coalesce(fingerprint = $3, true)
from {{inbox}}
where consumer = $1
	and message_id = $2`

	// The upsert locks the row of the key, or waits for the transaction that holds the lock.
	// So at most one message of a key is between here and its commit, in any process. The
	// statement after it sees the values that decided this one, since nobody changes a
	// locked row.
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
	notesDischarge = `
update {{inbox_failures}}
set alone = alone - 1
where consumer = $1
	and message_id = $2
	and alone > 0`
	notesForget = `
delete from {{inbox_failures}}
where consumer = $1
	and message_id = $2`
)

// complete adds the texts that are the same everywhere, and fills in the table names.
func (t notesText) complete(cfg database.Database) notesText {
	t.sameFingerprint, t.advance, t.sequence = notesSameFingerprint, notesAdvance, notesSequence
	t.charge, t.discharge, t.forget = notesCharge, notesDischarge, notesForget
	for _, text := range []*string{
		&t.sameFingerprint, &t.reopen, &t.markDead,
		&t.noteStart, &t.charge, &t.discharge, &t.noteEnd, &t.countFailure, &t.keepErrors, &t.forget,
		&t.pruneIDs, &t.pruneHandled, &t.pruneOld,
		&t.advance, &t.sequence, &t.retried, &t.countRefused,
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
	var early int64
	err := n.write(ctx, turn.Caller, func(via session) error {
		return via.QueryRowContext(ctx, n.text.noteStart, n.consumer, id, replay).Scan(&noted.suspect, &early)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return start{}, nil // a duplicate
	}
	if err != nil {
		return start{}, err
	}
	noted.early = time.Duration(early) * time.Microsecond
	return noted, nil
}

func (n *notes) charge(ctx context.Context, id string) (alone int, err error) {
	err = n.write(ctx, turn.Caller, func(via session) error {
		return via.QueryRowContext(ctx, n.text.charge, n.consumer, id).Scan(&alone)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil // handled meanwhile
	}
	return alone, err
}

func (n *notes) discharge(ctx context.Context, id string) error {
	return n.write(ctx, turn.Caller, func(via session) error {
		_, err := via.ExecContext(ctx, n.text.discharge, n.consumer, id)
		return err
	})
}

func (n *notes) noteEnd(ctx context.Context, id string, noted start) error {
	return n.write(ctx, turn.Caller, func(via session) error {
		_, err := via.ExecContext(ctx, n.text.noteEnd, n.consumer, id, noted.charged)
		return err
	})
}

func (n *notes) recordFailure(ctx context.Context, id string, noted start, f failure) (rec record, err error) {
	failed, unavailable := 1, 0
	switch {
	case f.uncounted:
		failed = 0
	case f.unavailable:
		failed, unavailable = 0, 1
	}
	err = n.inTx(ctx, func(tx *sql.Tx) error {
		var kept string
		var now int64
		err := tx.QueryRowContext(ctx, n.text.countFailure, n.consumer, id, noted.noted, noted.charged, failed, unavailable, f.key, f.seq).
			Scan(&rec.failures, &rec.unavailable, &kept, &now)
		if err != nil {
			return err
		}
		if kept, err = rec.add(kept, time.UnixMicro(now), f.text); err != nil {
			return err
		}
		rec.again = f.again(rec)
		_, err = tx.ExecContext(ctx, n.text.keepErrors, n.consumer, id, kept, rec.again.Microseconds())
		return err
	})
	return rec, err
}

// session is the pool or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// write runs do, which executes one writing statement; on SQLite it waits for its turn.
func (n *notes) write(ctx context.Context, kind turn.Kind, do func(session) error) error {
	if n.sqlite {
		return sqlitetx.Write(ctx, n.db, kind, func(tx *sql.Tx) error { return do(tx) })
	}
	return do(n.db)
}

// inTx runs do in a transaction that is independent of any handler. PostgreSQL ends it
// when its client falls silent, since the message could not be handled while it is open.
func (n *notes) inTx(ctx context.Context, do func(tx *sql.Tx) error) error {
	if n.sqlite {
		return sqlitetx.Write(ctx, n.db, turn.Caller, do)
	}
	return shorttx.Run(ctx, n.db, shorttx.Within(ctx), do)
}

func (n *notes) retried(ctx context.Context, tx *sql.Tx, key string, seq int64, wait time.Duration) (retried bool, err error) {
	err = tx.QueryRowContext(ctx, n.text.retried, n.consumer, key, seq, wait.Microseconds()).Scan(&retried)
	return retried, err
}

func (n *notes) countRefused(ctx context.Context, tx *sql.Tx, o origin, of int) (counted int64, err error) {
	err = tx.QueryRowContext(ctx, n.text.countRefused, n.consumer, o.topic, o.reason, of, refusedFor.Microseconds()).Scan(&counted)
	return counted, err
}

func (n *notes) forgetFailures(ctx context.Context, tx *sql.Tx, id string) error {
	_, err := tx.ExecContext(ctx, n.text.forget, n.consumer, id)
	return err
}

func (n *notes) prune(ctx context.Context, retention time.Duration, limit int) (ids, notes int64, err error) {
	if ids, err = n.pruneBy(ctx, n.text.pruneIDs, n.consumer, retention.Microseconds(), limit); err != nil {
		return ids, 0, err
	}
	of, err := n.pruneBy(ctx, n.text.pruneHandled, n.consumer, limit)
	if err != nil {
		return ids, of, err
	}
	old, err := n.pruneBy(ctx, n.text.pruneOld, n.consumer, retention.Microseconds(), limit)
	return ids, of + old, err
}

func (n *notes) pruneBy(ctx context.Context, text string, args ...any) (rows int64, err error) {
	err = n.write(ctx, turn.Background, func(via session) error {
		rows, err = affected(via.ExecContext(ctx, text, args...))
		return err
	})
	return rows, err
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
