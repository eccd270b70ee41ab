package oncemill

import (
	"context"
	"database/sql"
	"errors"
	"time"
)

// mostLockWait is how long a migration waits for a lock: for another migrator, or
// for the transactions that use a table that a step changes. Whoever uses that
// table meanwhile queues behind it.
const mostLockWait = time.Minute

// lockWait leaves a part of the time of ctx to say what stood in the way.
func lockWait(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return mostLockWait
	}
	return max(time.Millisecond, min(mostLockWait, 3*time.Until(deadline)/4))
}

// Others' sessions show their role and name to everybody. The key of an advisory
// lock of 64 bits is in two columns, and objsubid is 1.
const selectHolder = `
select a.pid, coalesce(a.usename, ''), a.application_name
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
	and l.database = (select oid from pg_database where datname = current_database())
	and (l.classid::bigint << 32 | l.objid::bigint) = ` + migrationLock + `
limit 1`

// lockError is what a lock timeout becomes. With holder it names the session that
// has the lock of migrations, if that is still there.
func (m migrator) lockError(ctx context.Context, err error, wait time.Duration, holder bool) error {
	locked := &MigrationLockError{Waited: wait, Err: err}
	if !holder {
		return locked
	}
	row := m.conn.QueryRowContext(ctx, m.cfg.Expand(selectHolder))
	if look := row.Scan(&locked.PID, &locked.User, &locked.Application); look != nil && !errors.Is(look, sql.ErrNoRows) {
		return errors.Join(locked, look)
	}
	return locked
}
