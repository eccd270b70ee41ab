package outboxqueue

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// ErrNoAnswer is returned by Archive when the database did not answer in time. The call
// that was running may have taken effect.
var ErrNoAnswer = errors.New("outbox: no answer from the database")

const (
	// Nothing waits for a read, which may return one message of 128 MiB.
	archiveReadLimit   = 30 * time.Second
	archiveRemoveLimit = 10 * time.Second

	// archiveAbandoned is how many such calls may be left behind at a time.
	archiveAbandoned = 2

	archiveRows  = 500
	archiveBytes = 8 << 20
)

// Archives reports whether rows past their retention are archived.
func (q *Queue) Archives() bool { return q.box.Config().Archive != nil }

// Archive calls Config.Archive with rows past their retention, a batch at a time, and
// removes each batch after it has returned nil. It ends when nothing is left, on an
// error, or without the lease, and returns how many rows it removed. guard is as in
// [Queue.Maintain]; it is called before and after Config.Archive runs, not meanwhile.
// Config.Archive may take its time. The database may not: the error is [ErrNoAnswer]
// then.
func (q *Queue) Archive(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (archived int, err error) {
	if !q.Archives() {
		return 0, nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("archive history: %w", err)
		}
	}()
	archive := func(ctx context.Context, rows []outbox.HistoryRow) error {
		return nopanic.Call(func() error { return q.box.Config().Archive(ctx, rows) })
	}
	limits := outboxstore.ExpiredLimits{Retention: q.retention, Rows: archiveRows, Bytes: archiveBytes}
	for last := (outboxstore.Expired{}); ; {
		batch, err := bounded.Do(ctx, q.archiving, archiveReadLimit, func(ctx context.Context) (outboxstore.Expired, error) {
			return q.store.Expired(ctx, guard, last, limits)
		})
		if err != nil || len(batch.Rows) == 0 {
			return archived, noAnswer(err)
		}
		if err := archive(ctx, historyRows(batch.Rows)); err != nil {
			return archived, err
		}
		removed, err := bounded.Do(ctx, q.archiving, archiveRemoveLimit, func(ctx context.Context) (bool, error) {
			return q.store.DeleteExpired(ctx, guard, batch)
		})
		if err != nil || !removed {
			return archived, noAnswer(err)
		}
		archived += len(batch.Rows)
		last = batch
	}
}

// noAnswer marks an error as ErrNoAnswer if the database gave no answer in time.
func noAnswer(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, bounded.ErrTooManyAbandoned) {
		return fmt.Errorf("%w: %w", ErrNoAnswer, err)
	}
	return err
}

func historyRows(stored []outboxstore.HistoryRow) []outbox.HistoryRow {
	rows := make([]outbox.HistoryRow, len(stored))
	for i, r := range stored {
		rows[i] = outbox.HistoryRow(r)
	}
	return rows
}
