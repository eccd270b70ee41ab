package turn

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrNested says that who asks for the turn holds it.
	ErrNested = errors.New("oncemill: a transaction was begun inside another one of the same SQLite database, which has one writer; use the transaction in the context")

	// ErrLocked says that somebody else has written for long.
	ErrLocked error = &lockedError{}
)

type lockedError struct{}

func (*lockedError) Error() string {
	return "oncemill: the SQLite database has been locked for 10s; is there a transaction that does not end?"
}

// Code makes it the same to whoever looks at codes as what SQLite itself would return.
func (*lockedError) Code() int { return sqliteBusy }

// SQLite's primary result codes.
const (
	sqliteError = 1
	sqliteBusy  = 5
)

func code(err error) int {
	var lite interface{ Code() int } // *sqlite.Error of modernc.org/sqlite
	if errors.As(err, &lite) {
		return lite.Code() & 0xff
	}
	return 0
}

// Begin calls begin, which begins a transaction on conn as the writer, until the lock
// is free, ctx ends, or ten seconds have passed. conn does not wait in SQLite meanwhile,
// which knows nothing of contexts.
//
// begin must not run under a context that may end: a BEGIN that was interrupted may
// have taken effect. If somebody else's has, and left conn in a transaction, that is
// rolled back.
func (t *Turn) Begin(ctx context.Context, conn *sql.Conn, begin func(ctx context.Context) error) (err error) {
	defer func() {
		if err == nil {
			t.began = time.Now() // what counts is how long the lock is held, not waited for
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
		// It cannot fail: it only sets a number.
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

// busyTimeout returns the milliseconds that connections wait in SQLite. They are the same
// for all of a handle: they come with the data source name.
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

// poll calls begin every millisecond while the database is locked. That costs a few
// system calls, and one of a process polls at a time.
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
