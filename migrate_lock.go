package oncemill

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// mostLockWait is how long a migration waits for a lock: for another migrator, or for
// transactions that use a table that a step changes. New users of that table queue
// behind the migration meanwhile.
const mostLockWait = time.Minute

// lockWait reserves part of the time left in ctx for reporting which session is in the
// way.
func lockWait(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return mostLockWait
	}
	return max(time.Millisecond, min(mostLockWait, 3*time.Until(deadline)/4))
}

// Every role can see the role and application name of other sessions. pg_locks shows
// the key of a 64-bit advisory lock in two columns, with objsubid 1.
const selectHolder = `
select a.pid, coalesce(a.usename, ''), a.application_name
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
	and l.database = (select oid from pg_database where datname = current_database())
	and (l.classid::bigint << 32 | l.objid::bigint) = ` + migrationLock + `
limit 1`

// lockError returns the error for a lock timeout. With holder it names the session that
// holds the migration lock, if that session still exists.
func (m migrator) lockError(ctx context.Context, err error, wait time.Duration, holder bool) error {
	locked := &MigrationLockError{Waited: wait, Err: err}
	if !holder {
		return locked
	}
	row := m.conn.QueryRowContext(ctx, m.Expand(selectHolder))
	if look := row.Scan(&locked.PID, &locked.User, &locked.Application); look != nil && !errors.Is(look, sql.ErrNoRows) {
		return errors.Join(locked, look)
	}
	return locked
}
