package outboxstore

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

const (
	// System views, sorted by how far back they reach. A walsender shows its standby's
	// oldest snapshot here. A vacuum holds nothing back.
	postgresOldest = `
select kind, coalesce(pid, 0), coalesce(name, ''), coalesce(state, ''),
	coalesce((extract(epoch from clock_timestamp() - since) * 1000000)::bigint, 0)
from (
	select 'session' as kind, a.pid, a.application_name as name, a.state, a.xact_start as since,
		greatest(age(a.backend_xid), age(a.backend_xmin)) as reach
	from pg_stat_activity a
	where (a.backend_xid is not null or a.backend_xmin is not null)
		and a.pid <> pg_backend_pid()
		and a.backend_type <> 'autovacuum worker'
	union all
	select 'prepared transaction', null, x.gid, null, x.prepared, age(x.transaction)
	from pg_prepared_xacts x
	union all
	select 'replication slot', s.active_pid, s.slot_name, null, null, age(s.xmin)
	from pg_replication_slots s
	where s.xmin is not null
) h
order by reach desc, since
limit 1`

	postgresBlocked = `
select distinct on (since, l.pid)
	case when l.pid is null then 'prepared transaction' else 'session' end, coalesce(l.pid, 0),
	coalesce(a.application_name, x.gid, ''), coalesce(a.state, ''),
	coalesce((extract(epoch from clock_timestamp() - since) * 1000000)::bigint, 0)
from pg_locks l
left join pg_stat_activity a on a.pid = l.pid
left join pg_locks t on l.pid is null and t.locktype = 'transactionid' and t.virtualtransaction = l.virtualtransaction
left join pg_prepared_xacts x on x.transaction = t.transactionid
cross join lateral (select coalesce(a.xact_start, x.prepared)) s (since)
where l.granted
	and l.database = (select oid from pg_database where datname = current_database())
	and l.relation in ('{{outbox_0}}'::regclass, '{{outbox_1}}'::regclass, '{{outbox_2}}'::regclass, '{{outbox_3}}'::regclass)
	and l.pid is distinct from pg_backend_pid()
order by since, l.pid`
)

func (s *postgresStore) Held(ctx context.Context) (Held, error) {
	oldest, err := scanHolders(s.db.QueryContext(ctx, postgresOldest))
	if err != nil {
		return Held{}, fmt.Errorf("look for old snapshots: %w", err)
	}
	var held Held
	if len(oldest) > 0 {
		held.Oldest = &oldest[0]
	}
	if !s.ring.blocked() {
		return held, nil
	}
	if held.Blocked, err = scanHolders(s.db.QueryContext(ctx, s.upkeep.blocked)); err != nil {
		return Held{}, fmt.Errorf("look for locks on the ring: %w", err)
	}
	return held, nil
}

func scanHolders(rows *sql.Rows, err error) ([]Holder, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var out []Holder
	for rows.Next() {
		var h Holder
		var micros int64
		if err := rows.Scan(&h.Kind, &h.PID, &h.Application, &h.State, &micros); err != nil {
			return nil, err
		}
		h.Age = time.Duration(micros) * time.Microsecond
		out = append(out, h)
	}
	return out, rows.Err()
}
