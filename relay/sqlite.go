package relay

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

type sqliteLeases struct {
	db                                                                          *sql.DB
	aliveText, keepText, heldText, censusText, takeText, releaseText, leaveText string
	guardText, expireText, expireWorkerText, expireFormerText, forgetFormerText string
}

func newSQLiteLeases(db *sql.DB, names database.Database) *sqliteLeases {
	return &sqliteLeases{
		db:        db,
		aliveText: names.Expand(sqliteAlive), keepText: names.Expand(sqliteKeep), heldText: names.Expand(sqliteHeld),
		censusText: names.Expand(sqliteCensus), takeText: names.Expand(sqliteTake),
		releaseText: names.Expand(sqliteRelease), leaveText: names.Expand(sqliteLeave), guardText: names.Expand(sqliteGuard),
		expireText: names.Expand(sqliteExpire), expireWorkerText: names.Expand(sqliteExpireWorker),
		expireFormerText: names.Expand(sqliteExpireFormer), forgetFormerText: names.Expand(sqliteForgetFormer),
	}
}

// All by primary key. SQLite has one writer at a time: a writing statement sees the
// latest state, and nothing changes in between. Lanes are passed as JSON.
const (
	sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

	sqliteAlive = `
insert into {{relay_workers}} (owner, name, seen_until, ready, stopping)
values (?1, ?2, ` + sqliteNow + ` + ?3, ?4, ?5)
on conflict (owner) do update
set seen_until = excluded.seen_until, ready = excluded.ready, stopping = excluded.stopping`

	sqliteKeep = `
update {{relay_leases}}
set lease_until = ` + sqliteNow + ` + ?3
where owner = ?1 and lane in (select value from json_each(?2))`

	sqliteHeld = `select lane, epoch, lane in (select value from json_each(?2)) from {{relay_leases}} where owner = ?1`

	sqliteCensus = `
select lane, owner, epoch, lease_until - ` + sqliteNow + `, lease_until, 0, 0
from {{relay_leases}}
union all
select -2, owner, 0, 0, seen_until, ready, stopping
from {{relay_workers}}
where seen_until > ` + sqliteNow

	// Absent owners are counted before the first row changes.
	sqliteTake = `
with absent (owners) as materialized (
	select count(distinct owner)
	from {{relay_leases}}
	where owner not in ('', ?1) and lease_until < ` + sqliteNow + `
), alive (lane) as materialized (
	select l.lane
	from {{relay_leases}} l
	join {{relay_workers}} w on w.owner = l.owner
	where w.seen_until > l.lease_until + ?4 / 30
)
update {{relay_leases}}
set owner = ?1, epoch = epoch + 1, lease_until = ` + sqliteNow + ` + ?4,
	crashes = crashes + (
		owner not in ('', ?1) and lane not in (select lane from alive) and (select owners from absent) < 2 and (
			suspect is not null
			or exists (select 1 from {{outbox}} o where o.lane = {{name:relay_leases}}.lane)
			or exists (select 1 from {{parked}} p where p.lane = {{name:relay_leases}}.lane and p.next_at <= ` + sqliteNow + `)
		)
	),
	suspect = iif(lane in (select lane from alive), null, suspect)
where lane in (
	select lane
	from {{relay_leases}}
	where lane in (select value from json_each(?2)) and lease_until < ` + sqliteNow + `
	limit ?3
)
returning lane, epoch, crashes, coalesce(suspect, 0)`

	sqliteExpire = `
update {{relay_leases}}
set lease_until = ` + sqliteNow + ` - 1
where lane = ?1 and owner = ?2 and epoch = ?3 and lease_until = ?4`

	sqliteExpireWorker = `delete from {{relay_workers}} where owner = ?1 and seen_until = ?2`

	sqliteExpireFormer = `
update {{relay_leases}}
set lease_until = ` + sqliteNow + ` - 1
where lease_until > ` + sqliteNow + ` and owner in (select owner from {{relay_workers}} where name = ?2 and owner <> ?1)`

	sqliteForgetFormer = `delete from {{relay_workers}} where name = ?2 and owner <> ?1`

	sqliteRelease = `
update {{relay_leases}}
set owner = '', suspect = null, lease_until = ` + sqliteNow + ` - 1
where owner = ?1 and lane in (select value from json_each(?2))`

	// A leaving worker also removes workers that died more than an hour ago.
	sqliteLeave = `delete from {{relay_workers}} where owner = ?1 or seen_until < ` + sqliteNow + ` - 3600000000`

	// A write that changes nothing: from here on the transaction is the writer.
	sqliteGuard = `update {{relay_leases}} set epoch = epoch where lane = ?1 and owner = ?2 and epoch = ?3`
)

func jsonArray[T int | int64 | string](list []T) string {
	if list == nil {
		list = []T{} // nil would be null
	}
	text, _ := json.Marshal(list) // integers and strings cannot fail
	return string(text)
}

// beat is one transaction, like everything here that writes: it waits only for the
// transaction that writes now.
func (s *sqliteLeases) beat(ctx context.Context, me identity, lanes []int, term time.Duration) (held map[int]renewal, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, s.aliveText, me.owner, me.name, term.Microseconds(), me.ready, me.stopping); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.keepText, me.owner, jsonArray(lanes), term.Microseconds()); err != nil {
			return err
		}
		held, err = scanHeld(tx.QueryContext(ctx, s.heldText, me.owner, jsonArray(lanes)))
		return err
	})
	if err != nil {
		return nil, err
	}
	return held, nil
}

// write runs fn in a transaction ahead of all others that wait.
func (s *sqliteLeases) write(ctx context.Context, fn func(tx *sql.Tx) error) error {
	return sqlitetx.Write(ctx, s.db, turn.Heartbeat, fn)
}

func (s *sqliteLeases) census(ctx context.Context) ([]lease, []peer, error) {
	return scanCensus(s.db.QueryContext(ctx, s.censusText))
}

func (s *sqliteLeases) expireFormer(ctx context.Context, me identity) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, text := range []string{s.expireFormerText, s.forgetFormerText} {
			if _, err := tx.ExecContext(ctx, text, me.owner, me.name); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *sqliteLeases) expire(ctx context.Context, leases []lease, peers []peer) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, p := range peers {
			if _, err := tx.ExecContext(ctx, s.expireWorkerText, p.owner, p.until); err != nil {
				return err
			}
		}
		for _, l := range leases {
			if _, err := tx.ExecContext(ctx, s.expireText, l.lane, l.owner, l.epoch, l.until); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *sqliteLeases) take(ctx context.Context, owner string, lanes []int, most int, term time.Duration) (leases map[int]taken, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		leases, err = scanTaken(tx.QueryContext(ctx, s.takeText, owner, jsonArray(lanes), most, term.Microseconds()))
		return err
	})
	if err != nil {
		return nil, err
	}
	return leases, nil
}

func (s *sqliteLeases) release(ctx context.Context, owner string, lanes []int) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.releaseText, owner, jsonArray(lanes))
		return err
	})
}

// flush has nothing to do: with synchronous=FULL a commit is durable when it is
// visible.
func (s *sqliteLeases) flush(context.Context, string) error { return nil }

func (s *sqliteLeases) leave(ctx context.Context, owner string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, s.leaveText, owner)
		return err
	})
}

func (s *sqliteLeases) guard(ctx context.Context, tx *sql.Tx, lane int, owner string, epoch int64) (bool, error) {
	result, err := tx.ExecContext(ctx, s.guardText, lane, owner, epoch)
	if err != nil {
		return false, err
	}
	n, err := result.RowsAffected()
	return n == 1, err
}
