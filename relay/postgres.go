package relay

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
)

type postgresLeases struct {
	db                                                                                                         *sql.DB
	beatText, censusText, takeText, releaseText, leaveText, guardText, touchText, expireText, expireFormerText string
}

func newPostgresLeases(db *sql.DB, names database.Database) *postgresLeases {
	return &postgresLeases{
		db:       db,
		beatText: names.Expand(postgresBeat), censusText: names.Expand(postgresCensus),
		takeText: names.Expand(postgresTake), releaseText: names.Expand(postgresRelease),
		leaveText: names.Expand(postgresLeave), guardText: names.Expand(postgresGuard),
		touchText: names.Expand(postgresTouch), expireText: names.Expand(postgresExpire), expireFormerText: names.Expand(postgresExpireFormer),
	}
}

// All by primary key, over 33 rows and the rows of the workers. Each is one statement,
// so a process that stops in the middle holds no lock. Under a REPEATABLE READ default
// a statement that lost against another one fails with 40001 and is retried at the next
// heartbeat.
const (
	// Owner and epoch do not change, so extending an expired lease is right as long as
	// nobody took it. The update returns the extended leases. A lease that somebody has
	// locked, maybe to take it over, is not extended this time, and does not keep the
	// others from that.
	postgresBeat = `
with alive as (
	insert into {{relay_workers}} (owner, name, seen_until, ready, stopping)
	values ($1, $2, clock_timestamp() + $4::bigint * interval '1 microsecond', $5, $6)
	on conflict (owner) do update
	set seen_until = excluded.seen_until, ready = excluded.ready, stopping = excluded.stopping
), dead as (
	delete from {{relay_workers}}
	where owner in (
		select owner
		from {{relay_workers}}
		where owner <> $1 and seen_until < clock_timestamp() - interval '1 hour'
		for update skip locked
	)
), kept as (
	update {{relay_leases}}
	set lease_until = clock_timestamp() + $4::bigint * interval '1 microsecond'
	where lane in (
		select lane
		from {{relay_leases}}
		where owner = $1 and lane = any ($3::smallint[])
		for no key update skip locked
	)
	returning lane, epoch
)
select lane, epoch, true from kept
union all
select lane, epoch, false from {{relay_leases}} where owner = $1 and lane not in (select lane from kept)`

	postgresCensus = `
select lane, owner, epoch, (extract(epoch from lease_until - clock_timestamp()) * 1000000)::bigint,
	(date_part('epoch', lease_until) * 1000000)::bigint, false, false
from {{relay_leases}}
union all
select -2, owner, 0, 0, (date_part('epoch', seen_until) * 1000000)::bigint, ready, stopping
from {{relay_workers}}
where seen_until > clock_timestamp()`

	// FOR UPDATE conflicts with the FOR KEY SHARE of a fenced write. A takeover thus
	// waits for a running write, and the next fenced write of the former owner sees the
	// new epoch.
	//
	// An owner that outlives its lease has not died of a message: it could not finish
	// one in time, which is an outage.
	//
	// Whether a lane has anything to be charged for is one probe of an index of the
	// outbox, and one or two for each parked topic: the limits keep the planner from
	// hashing them.
	postgresTake = `
update {{relay_leases}} l
set owner = $1, epoch = l.epoch + 1, lease_until = clock_timestamp() + $4::bigint * interval '1 microsecond',
	crashes = l.crashes + case
		when free.owner not in ('', $1) and not free.alive and absent.owners < 2 and coalesce(
			l.suspect > 0,
			(select true from {{outbox}} o where o.lane = l.lane limit 1),
			(` + postgresOverdue + `),
			false) then 1
		else 0
	end,
	suspect = case when not free.alive then l.suspect end
from (
	select f.lane, f.owner, exists (
		select from {{relay_workers}} w
		where w.owner = f.owner and w.seen_until > f.lease_until + $4::bigint / 30 * interval '1 microsecond'
	) as alive
	from {{relay_leases}} f
	where f.lane = any ($2::smallint[]) and f.lease_until < clock_timestamp()
	limit $3
	for update of f skip locked
) free, (
	select count(distinct owner) as owners
	from {{relay_leases}}
	where owner not in ('', $1) and lease_until < clock_timestamp()
) absent
where l.lane = free.lane
returning l.lane, l.epoch, l.crashes, coalesce(l.suspect, 0)`

	// By the partial index (lane, topic, next_at), from each topic to the next.
	postgresOverdue = `
				with recursive t (topic) as (
					(select p.topic from {{parked}} p where p.lane = l.lane and p.next_at is not null order by p.topic limit 1)
					union all
					select (
						select p.topic
						from {{parked}} p
						where p.lane = l.lane and p.next_at is not null and p.topic > t.topic
						order by p.topic
						limit 1
					)
					from t
					where t.topic is not null
				)
				select true
				from t
				where (
					select p.next_at
					from {{parked}} p
					where p.lane = l.lane and p.topic = t.topic and p.next_at is not null
					order by p.next_at
					limit 1
				) <= clock_timestamp()
				limit 1
			`

	postgresExpire = `
with gone as (
	delete from {{relay_workers}} w
	using unnest($5::text[], $6::bigint[]) as s (owner, until)
	where w.owner = s.owner and w.seen_until = timestamptz 'epoch' + s.until * interval '1 microsecond'
)
update {{relay_leases}} l
set lease_until = clock_timestamp() - interval '1 microsecond'
from unnest($1::smallint[], $2::text[], $3::bigint[], $4::bigint[]) as s (lane, owner, epoch, until)
where l.lane = s.lane and l.owner = s.owner and l.epoch = s.epoch
	and l.lease_until = timestamptz 'epoch' + s.until * interval '1 microsecond'`

	// What somebody has locked stays, and expires.
	postgresExpireFormer = `
with former as (
	select owner
	from {{relay_workers}}
	where name = $2 and owner <> $1
	for update skip locked
), gone as (
	delete from {{relay_workers}} where owner in (select owner from former)
)
update {{relay_leases}}
set lease_until = clock_timestamp() - interval '1 microsecond'
where lane in (
	select lane
	from {{relay_leases}}
	where owner in (select owner from former) and lease_until > clock_timestamp()
	for no key update skip locked
)`

	postgresRelease = `
update {{relay_leases}}
set owner = '', suspect = null, lease_until = clock_timestamp()
where owner = $1 and lane = any ($2::smallint[])`

	postgresLeave = `delete from {{relay_workers}} where owner = $1`

	// A stronger setting, for example remote_apply, stays.
	postgresDurably = `select set_config('synchronous_commit', 'on', true)
where current_setting('synchronous_commit') in ('off', 'local', 'remote_write')`

	// A statement timeout would end COMMIT's wait for a synchronous standby, and COMMIT
	// would still succeed.
	postgresCommitInFull = `set local statement_timeout = 0`

	postgresTouch = `update {{relay_workers}} set seen_until = seen_until where owner = $1`

	// FOR KEY SHARE as in a fenced write: a takeover waits for the end of the
	// transaction, while the owner's own heartbeat does not.
	postgresGuard = `
select count(*)
from (select from {{relay_leases}} where lane = $1 and owner = $2 and epoch = $3 for key share) held`
)

func smallints(lanes []int) any {
	a := make([]int64, len(lanes))
	for i, l := range lanes {
		a[i] = int64(l)
	}
	return pq.Array(a)
}

func (s *postgresLeases) beat(ctx context.Context, me identity, lanes []int, term time.Duration) (map[int]renewal, error) {
	return scanHeld(s.db.QueryContext(ctx, s.beatText,
		me.owner, me.name, smallints(lanes), term.Microseconds(), me.ready, me.stopping))
}

func (s *postgresLeases) census(ctx context.Context) ([]lease, []peer, error) {
	return scanCensus(s.db.QueryContext(ctx, s.censusText))
}

func (s *postgresLeases) expireFormer(ctx context.Context, me identity) error {
	_, err := s.db.ExecContext(ctx, s.expireFormerText, me.owner, me.name)
	return err
}

func (s *postgresLeases) expire(ctx context.Context, leases []lease, peers []peer) error {
	lanes, owners, epochs, untils := make([]int, len(leases)), make([]string, len(leases)), make([]int64, len(leases)), make([]int64, len(leases))
	for i, l := range leases {
		lanes[i], owners[i], epochs[i], untils[i] = l.lane, l.owner, l.epoch, l.until
	}
	names, seen := make([]string, len(peers)), make([]int64, len(peers))
	for i, p := range peers {
		names[i], seen[i] = p.owner, p.until
	}
	_, err := s.db.ExecContext(ctx, s.expireText,
		smallints(lanes), pq.Array(owners), pq.Array(epochs), pq.Array(untils), pq.Array(names), pq.Array(seen))
	return err
}

func (s *postgresLeases) take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (map[int]taken, error) {
	return scanTaken(s.db.QueryContext(ctx, s.takeText, owner, smallints(lanes), most, term.Microseconds()))
}

func (s *postgresLeases) release(ctx context.Context, owner string, lanes []int) error {
	_, err := s.db.ExecContext(ctx, s.releaseText, owner, smallints(lanes))
	return err
}

// flush commits a change of the worker's own row. Its WAL record lies behind the
// commits of all that was visible before. Once it is durable, they are.
func (s *postgresLeases) flush(ctx context.Context, owner string) error {
	err := shorttx.Run(ctx, s.db, shorttx.For(shorttx.Idle), func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, postgresDurably); err != nil {
			return err
		}
		touched, err := tx.ExecContext(ctx, s.touchText, owner)
		if err != nil {
			return err
		}
		// A commit that changed nothing waits for nothing. The heartbeat restores the
		// row if it is missing, for example on a restored server.
		n, err := touched.RowsAffected()
		if err == nil && n == 0 {
			err = fmt.Errorf("worker %s is not registered yet", owner)
		}
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, postgresCommitInFull)
		return err
	})
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return nil
}

func (s *postgresLeases) leave(ctx context.Context, owner string) error {
	_, err := s.db.ExecContext(ctx, s.leaveText, owner)
	return err
}

func (s *postgresLeases) guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error) {
	var n int
	err := tx.QueryRowContext(ctx, s.guardText, lane, owner, epoch).Scan(&n)
	return n == 1, err
}
