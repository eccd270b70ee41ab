package inboxstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/turn"
)

// session is the pool or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// store is what the databases have in common.
type store struct {
	db       *sql.DB
	consumer string
	text     *texts

	// write runs one writing statement. inTx runs a transaction that is independent of any
	// handler.
	write func(ctx context.Context, kind turn.Kind, do func(session) error) error
	inTx  func(ctx context.Context, do func(*sql.Tx) error) error
	list  func([]string) any // as an argument

	mu     sync.Mutex
	looked string // the last id that purgeHandled has looked at; empty: it begins again
}

// texts are the statements that all databases have. They take the same arguments; times
// are in microseconds.
type texts struct {
	SameFingerprint, Reopen, MarkDead                   string
	RecordStart, Charge, Discharge, RecordEnd           string
	CountFailure, KeepErrors                            string
	FailedDeliveries, DeleteFailures                    string
	PurgeIDs, PurgeHandled, PurgeFailures, CountRefused string
	OldIDs, DeleteIDs                                   string
	FailuresAfter, Consumers, FailingConsumers          string
	Advance, LastSequence, Retried                      string
	Now, CountConsumer, HandledAt, Handled              string
}

func (s *store) SameFingerprint(ctx context.Context, tx *sql.Tx, id string, fingerprint []byte) (same bool, err error) {
	err = tx.QueryRowContext(ctx, s.text.SameFingerprint, s.consumer, id, fingerprint).Scan(&same)
	if errors.Is(err, sql.ErrNoRows) { // purged, or above READ COMMITTED too new to be seen
		return false, ErrBeingHandled
	}
	return same, err
}

func (s *store) Reopen(ctx context.Context, tx *sql.Tx, id string) error {
	return elsewhere(s.exec(ctx, tx, s.text.Reopen, s.consumer, id))
}

// elsewhere marks an error that another transaction caused.
func elsewhere(err error) error {
	if err != nil && sqlerr.Contended(err) {
		return fmt.Errorf("%w: %w", ErrBeingHandled, err)
	}
	return err
}

func (s *store) MarkDead(ctx context.Context, tx *sql.Tx, id string) error {
	return s.exec(ctx, tx, s.text.MarkDead, s.consumer, id)
}

func (s *store) exec(ctx context.Context, via session, text string, args ...any) error {
	_, err := via.ExecContext(ctx, text, args...)
	return err
}

// seal returns an error unless the statement sealed one transaction.
func seal(result sql.Result, err error) error {
	sealed, err := database.Affected(result, err)
	if err != nil {
		return fmt.Errorf("seal: %w", sqlerr.OfSeal(err))
	}
	if sealed != 1 {
		return ErrTxEnded
	}
	return nil
}

func (s *store) Advance(ctx context.Context, tx *sql.Tx, key string, seq int64, skip bool) (Position, error) {
	var last int64
	err := tx.QueryRowContext(ctx, s.text.Advance, s.consumer, key, seq, skip).Scan(&last)
	if err == nil {
		return PositionNext, nil
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return 0, err
	}
	if err := tx.QueryRowContext(ctx, s.text.LastSequence, s.consumer, key).Scan(&last); err != nil {
		return 0, err
	}
	if seq <= last {
		return PositionPassed, nil
	}
	return PositionEarly, nil
}

func (s *store) Retried(ctx context.Context, tx *sql.Tx, key string, seq int64, wait time.Duration) (retried bool, err error) {
	err = tx.QueryRowContext(ctx, s.text.Retried, s.consumer, key, seq, wait.Microseconds()).Scan(&retried)
	return retried, err
}

func (s *store) RecordStart(ctx context.Context, id string, replay bool) (Start, error) {
	start := Start{Recorded: true}
	var early int64
	err := s.write(ctx, turn.Caller, func(via session) error {
		return via.QueryRowContext(ctx, s.text.RecordStart, s.consumer, id, replay).Scan(&start.Unended, &early)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return Start{}, nil
	}
	if err != nil {
		return Start{}, err
	}
	start.Early = time.Duration(early) * time.Microsecond
	return start, nil
}

func (s *store) RecordEnd(ctx context.Context, id string, charged bool) error {
	return s.write(ctx, turn.Caller, func(via session) error {
		return s.exec(ctx, via, s.text.RecordEnd, s.consumer, id, charged)
	})
}

func (s *store) Charge(ctx context.Context, id string) (unended int, err error) {
	// Not one statement by itself: a server that is frozen may execute it after it was abandoned,
	// and a charge too many makes a dead letter of a message that has crashed nothing.
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, s.text.Charge, s.consumer, id).Scan(&unended)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return unended, err
}

func (s *store) Discharge(ctx context.Context, id string) error {
	return s.write(ctx, turn.Caller, func(via session) error {
		return s.exec(ctx, via, s.text.Discharge, s.consumer, id)
	})
}

func (s *store) RecordFailure(ctx context.Context, id string, f Failure) (rec Record, err error) {
	failures, unavailable := f.counts()
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		rec = Record{}
		var kept string
		var now int64
		err := tx.QueryRowContext(ctx, s.text.CountFailure, s.consumer, id, f.Recorded, f.Charged, failures, unavailable, f.Key, f.Seq).
			Scan(&rec.Failures, &rec.Unavailable, &kept, &now)
		if err != nil {
			return err
		}
		if kept, err = rec.add(kept, time.UnixMicro(now), f.Text); err != nil {
			return err
		}
		rec.Again = f.Again(rec)
		return s.exec(ctx, tx, s.text.KeepErrors, s.consumer, id, kept, rec.Again.Microseconds())
	})
	return rec, err
}

func (s *store) FailedDeliveries(ctx context.Context, tx *sql.Tx, id string) (failures, unavailable int, err error) {
	err = tx.QueryRowContext(ctx, s.text.FailedDeliveries, s.consumer, id).Scan(&failures, &unavailable)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, 0, nil
	}
	return failures, unavailable, err
}

func (s *store) DeleteFailures(ctx context.Context, tx *sql.Tx, id string) error {
	return s.exec(ctx, tx, s.text.DeleteFailures, s.consumer, id)
}

func (s *store) CountRefused(ctx context.Context, tx *sql.Tx, topic, reason string, n int, within time.Duration) (counted int64, err error) {
	err = tx.QueryRowContext(ctx, s.text.CountRefused, s.consumer, topic, reason, n, within.Microseconds()).Scan(&counted)
	return counted, err
}

func (s *store) Purge(ctx context.Context, retention time.Duration, limit int) (ids, failures int64, err error) {
	if ids, err = s.purge(ctx, s.text.PurgeIDs, s.consumer, retention.Microseconds(), limit); err != nil {
		return ids, 0, err
	}
	failures, err = s.PurgeFailures(ctx, retention, limit)
	return ids, failures, err
}

func (s *store) PurgeFailures(ctx context.Context, retention time.Duration, limit int) (failures int64, err error) {
	handled, err := s.purgeHandled(ctx, limit)
	if err != nil {
		return handled, err
	}
	old, err := s.purge(ctx, s.text.PurgeFailures, s.consumer, retention.Microseconds(), limit)
	return handled + old, err
}

func (s *store) OldIDs(ctx context.Context, retention time.Duration, limit int) (ids []OldID, err error) {
	rows, err := s.db.QueryContext(ctx, s.text.OldIDs, s.consumer, retention.Microseconds(), limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		var id OldID
		var at int64
		if err := rows.Scan(&id.MessageID, &at); err != nil {
			return nil, err
		}
		id.ReceivedAt = time.UnixMicro(at).UTC()
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

func (s *store) DeleteIDs(ctx context.Context, retention time.Duration, ids []OldID) (int64, error) {
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = id.MessageID
	}
	return s.purge(ctx, s.text.DeleteIDs, s.consumer, retention.Microseconds(), s.list(list))
}

// purgeHandled removes the failure records of handled messages from the next piece of the
// table.
func (s *store) purgeHandled(ctx context.Context, limit int) (rows int64, err error) {
	s.mu.Lock()
	first := s.looked
	s.mu.Unlock()
	var n int
	var last string
	if err := s.db.QueryRowContext(ctx, s.text.FailuresAfter, s.consumer, first, limit).Scan(&n, &last); err != nil {
		return 0, err
	}
	if n > 0 {
		if rows, err = s.purge(ctx, s.text.PurgeHandled, s.consumer, first, last); err != nil {
			return 0, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = last
	if n < limit {
		s.looked = ""
	}
	return rows, nil
}

func (s *store) purge(ctx context.Context, text string, args ...any) (rows int64, err error) {
	err = s.write(ctx, turn.Background, func(via session) error {
		rows, err = database.Affected(via.ExecContext(ctx, text, args...))
		return err
	})
	return rows, err
}

func (s *store) Ping(ctx context.Context) error { return s.db.PingContext(ctx) }

func (s *store) Now(ctx context.Context) (time.Time, error) {
	var micros int64
	err := s.db.QueryRowContext(ctx, s.text.Now).Scan(&micros)
	return time.UnixMicro(micros), err
}
