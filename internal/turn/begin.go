package turn

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrNested is returned to a caller whose own transaction holds the turn.
	ErrNested = errors.New("oncemill: cannot begin a transaction inside another one of the same SQLite database; use the transaction in the context")

	// ErrLocked is returned when another writer has kept the database locked for ten seconds.
	ErrLocked error = &lockedError{}
)

type lockedError struct{}

func (*lockedError) Error() string {
	return "oncemill: the SQLite database has been locked for 10s; look for a transaction that does not end"
}

// Code returns SQLITE_BUSY, for callers that look at the codes of the driver's errors.
func (*lockedError) Code() int { return sqliteBusy }

// SQLite's primary result codes.
const (
	sqliteError = 1
	sqliteBusy  = 5
)

func code(err error) int {
	var sqliteErr interface{ Code() int } // *sqlite.Error of modernc.org/sqlite
	if errors.As(err, &sqliteErr) {
		return sqliteErr.Code() & 0xff
	}
	return 0
}

// Begin calls begin, which begins a write transaction on conn, until SQLite's lock is
// free, ctx ends, or ten seconds have passed. It polls, since SQLite's own wait ignores
// contexts.
//
// begin gets a context that does not end: an interrupted BEGIN may have taken effect. If
// an earlier user of conn left a transaction open, Begin rolls it back.
func (t *Turn) Begin(ctx context.Context, conn *sql.Conn, begin func(ctx context.Context) error) (err error) {
	defer func() {
		if err == nil {
			t.began = time.Now() // only the time with the lock counts
		}
	}()
	whole := context.WithoutCancel(ctx)
	busyTimeout, err := t.turns.busyTimeout(whole, conn)
	if err != nil {
		return err
	}
	if _, err := conn.ExecContext(whole, `pragma busy_timeout = 0`); err != nil {
		return err
	}
	defer func() {
		// Cannot fail: it only sets a number.
		_, _ = conn.ExecContext(whole, fmt.Sprintf(`pragma busy_timeout = %d`, busyTimeout))
	}()
	err = begin(whole)
	if code(err) == sqliteError {
		if _, there := conn.ExecContext(whole, `rollback`); there == nil {
			err = begin(whole)
		}
	}
	if code(err) != sqliteBusy {
		return err
	}
	return poll(ctx, func() error { return begin(whole) })
}

// busyTimeout returns SQLite's busy timeout in milliseconds. It comes from the data source
// name, so it is the same for all connections of a handle.
func (t *Turns) busyTimeout(ctx context.Context, conn *sql.Conn) (millis int64, err error) {
	if millis = t.busy.Load(); millis > 0 {
		return millis, nil
	}
	if err := conn.QueryRowContext(ctx, `pragma busy_timeout`).Scan(&millis); err != nil {
		return 0, err
	}
	t.busy.Store(millis)
	return millis, nil
}

// poll calls begin every millisecond while the database is locked. Each call costs a few
// system calls, and only the holder of the turn polls.
func poll(ctx context.Context, begin func() error) error {
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for since := time.Now(); ; {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for another process to write: %w", ctx.Err())
		}
		err := begin()
		if code(err) != sqliteBusy {
			return err
		}
		if time.Since(since) > maxWait {
			return fmt.Errorf("%w (%w)", ErrLocked, err)
		}
	}
}
