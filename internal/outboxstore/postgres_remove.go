package outboxstore

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/shorttx"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Served by the primary keys (lane, id). The repeated partition expression lets the
// executor go to the one partition. Rows are locked in the order of the arrays, which
// are sorted by id. Two workers that still deadlock, after a takeover, get 40P01, and
// the caller tries again. The sub-selects hide the length of the arrays from the
// planner, which would scan and hash the whole table for a few thousand rows (90 us a
// row instead of 2).
const (
	postgresRemove = `
delete from {{outbox}} o
using unnest(
	(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
) as c (lane, id, message_id, created_micros)
where o.lane = c.lane
	and o.id = c.id
	and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
	and o.message_id = c.message_id
	and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'`

	postgresMove = postgresMoveHead + postgresRemove + postgresMoveTail

	postgresMoveHead = `
with gone as (`
	postgresMoveTail = `
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at
)` + postgresKeep

	postgresKeep = `
insert into {{outbox_history}} (lane, id, topic, message_id, key, payload, metadata, created_at, relayed_at)
select lane, id, topic, message_id, key, payload, metadata, created_at, clock_timestamp()
from gone`
)

// The same, but rows that others have locked are left alone. Locking costs a WAL record
// for each row, so this is only for rows that the plain deletion has waited for without
// success. Rows in the snapshot that were not locked here are returned, by their
// position in the arrays: another transaction has locked them, or they were deleted
// meanwhile.
//
// FOR UPDATE needs the right to update the table.
const (
	postgresRemoveFree = postgresFreeHead + `
)` + postgresFreeTail

	postgresMoveFree = postgresFreeHead + `
), kept as (` + postgresKeep + `
)` + postgresFreeTail

	postgresFreeHead = `
with confirmed as materialized (
	select *
	from unnest(
		(select $1::smallint[]), (select $2::bigint[]), (select $3::text[]), (select $4::bigint[])
	) with ordinality as c (lane, id, message_id, created_micros, n)
), free as materialized (
	select o.lane, o.id, c.n
	from confirmed c
	join {{outbox}} o on o.lane = c.lane
		and o.id = c.id
		and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
		and o.message_id = c.message_id
		and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
	for update of o skip locked
), gone as (
	delete from {{outbox}} o
	using free f
	where o.lane = f.lane
		and o.id = f.id
		and ((o.id >> 16) & 3) = ((f.id >> 16) & 3)
	returning o.lane, o.id, o.topic, o.message_id, o.key, o.payload, o.metadata, o.created_at`

	postgresFreeTail = `
select
	(select count(*) from gone),
	array(
		select c.n
		from confirmed c
		join {{outbox}} o on o.lane = c.lane
			and o.id = c.id
			and ((o.id >> 16) & 3) = ((c.id >> 16) & 3)
			and o.message_id = c.message_id
			and o.created_at = timestamptz 'epoch' + c.created_micros * interval '1 microsecond'
		where c.n not in (select f.n from free f)
	)`
)

// A scan of the row addresses $1 in one partition of the ring, without an index. An
// address alone does not identify a row. Before the first row is touched, $2 is
// compared with the digest of the identities of all rows found, in the order of the
// addresses (a TID scan sorts them). If it differs, the statement does nothing. Both
// scans use one snapshot, in which the row at an address does not change.
//
// In the digested bytes a message id ends with the first byte of its lane, which is
// NUL.
const postgresSweepRows = `
delete from {{partition}} o
where o.ctid = any ((select $1::tid[])::tid[])
	and (
		select sha256(string_agg(textsend(p.message_id) || int2send(p.lane) || int8send(p.id) || timestamptz_send(p.created_at), '')) = $2::bytea
		from {{partition}} p
		where p.ctid = any ((select $1::tid[])::tid[])
	)`

// postgresSweep are the texts for one partition.
type postgresSweep struct{ remove, move string }

func newPostgresSweep(names database.Database, partition int) postgresSweep {
	text := strings.ReplaceAll(postgresSweepRows, "{{partition}}", fmt.Sprintf("{{outbox_%d}}", partition))
	return postgresSweep{
		remove: names.Expand(text),
		move:   names.Expand(postgresMoveHead + text + postgresMoveTail),
	}
}

// worthSweeping is the number of rows of a partition below which a separate statement
// does not pay. (In a table of a few pages the planner prefers to scan them.)
const (
	worthSweeping = 64
	mostSwept     = 1 << 16
)

const (
	// A deletion that skips locked rows waits only for table locks. The plain one gives
	// up sooner, since it mostly waits for a row.
	waitForRow   = 100 * time.Millisecond
	waitForTable = 500 * time.Millisecond

	// A batch takes some milliseconds.
	removeLimit = 4 * time.Second

	// How long nothing is moved into a history that was found locked: each batch would
	// wait for it.
	historyRest = 10 * time.Second
)

// removing is a way to remove rows by identity.
type removing struct {
	keep bool // moves rows into the history
	free bool // skips rows that are locked
}

// remove tries the cheapest way first, then the others: rows may have moved, or be
// locked, and the history must never stop delivery.
func (s *postgresStore) Remove(ctx context.Context, rows []Ref) (Removal, error) {
	way := removing{keep: s.history > 0 && !s.historyLocked.lasts(time.Now())}
	rest, missed, locked, err := s.removeByPlace(ctx, rows, way.keep)
	if err != nil || len(rest) == 0 {
		return Removal{Missed: missed}, err
	}
	way.free = locked
	slices.SortFunc(rest, func(a, b Ref) int { return cmp.Compare(a.ID, b.ID) })
	var broken error
	for {
		removed, left, err := s.removeByIdentity(ctx, rest, way)
		switch {
		case err == nil:
			if s.history > 0 && !way.keep {
				missed += removed
			}
			if broken != nil {
				reportMissed(ctx, s.log, removed, broken)
			}
			if sqlerr.TimedOut(broken) {
				s.historyLocked.begin(time.Now().Add(historyRest))
			}
			return Removal{Missed: missed, Locked: left}, nil
		case inconclusive(ctx, err):
			return Removal{Missed: missed}, fmt.Errorf("remove confirmed: %w", err)
		case sqlerr.TimedOut(err) && !way.free:
			way.free = true
		case way.keep:
			way.keep, broken = false, err
		default:
			return Removal{Missed: missed}, fmt.Errorf("delete confirmed: %w", err)
		}
	}
}

// inconclusive reports whether an error says nothing about the statement.
func inconclusive(ctx context.Context, err error) bool {
	return ctx.Err() != nil || sqlerr.Connection(err) || sqlerr.Retryable(err) || sqlerr.Full(err)
}

// removeByIdentity returns how many rows were removed, and those that are locked.
func (s *postgresStore) removeByIdentity(ctx context.Context, rows []Ref, way removing) (removed int, locked []Ref, err error) {
	if !way.free {
		text := s.removeText
		if way.keep {
			text = s.moveText
		}
		removed, err = s.removeWith(ctx, text, removeArgs(rows)...)
		return removed, nil, err
	}
	text := s.removeFree
	if way.keep {
		text = s.moveFree
	}
	var places []int64
	limits := shorttx.Limits{Lock: waitForTable, Statement: removeLimit}
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, text, removeArgs(rows)...).Scan(&removed, pq.Array(&places))
	})
	if err != nil {
		return 0, nil, err
	}
	for _, place := range places {
		locked = append(locked, rows[place-1])
	}
	return removed, locked, nil
}

// removeWith executes a text that waits for locked rows.
func (s *postgresStore) removeWith(ctx context.Context, text string, args ...any) (removed int, err error) {
	limits := shorttx.Limits{Lock: waitForRow, Statement: removeLimit}
	err = shorttx.Run(ctx, s.db, limits, func(tx *sql.Tx) error {
		n, err := affected(tx.ExecContext(ctx, text, args...))
		removed = int(n)
		return err
	})
	if err != nil {
		return 0, err
	}
	return removed, nil
}

// removeByPlace removes rows at the place where they were read, at half the cost. It
// returns those that must be removed by identity: all rows of a partition if one of
// them has moved or is locked.
func (s *postgresStore) removeByPlace(ctx context.Context, rows []Ref, keep bool) (rest []Ref, missed int, locked bool, err error) {
	if len(rows) < worthSweeping {
		return slices.Clone(rows), 0, false, nil
	}
	var parts [len(s.sweep)][]Ref
	for _, r := range rows {
		if r.CTID == (CTID{}) {
			rest = append(rest, r)
			continue
		}
		at := partitionOf(r.ID)
		parts[at] = append(parts[at], r)
	}
	for i, part := range parts {
		if len(part) < worthSweeping || len(part) > mostSwept || locked {
			rest = append(rest, part...)
			continue
		}
		text := s.sweep[i].remove
		if keep {
			text = s.sweep[i].move
		}
		removed, err := s.removeWith(ctx, text, sweepArgs(part)...)
		if err != nil && inconclusive(ctx, err) {
			return nil, missed, false, fmt.Errorf("remove confirmed: %w", err)
		}
		// Any other error is for the fallback to report or avoid: it needs no right on
		// the partition, and a broken history does not stop it.
		if err == nil && removed == len(part) {
			if s.history > 0 && !keep {
				missed += removed
			}
			continue
		}
		locked = sqlerr.TimedOut(err)
		rest = append(rest, part...)
	}
	return rest, missed, locked, nil
}

func partitionOf(id int64) int { return int(id >> 16 & 3) }

// sweepArgs returns the places of rows, in their order, and the digest of the
// identities in the same order.
func sweepArgs(rows []Ref) []any {
	const usualID = 36
	places := make([]byte, 0, len(rows)*len(`"(123456,12)",`))
	identities := make([]byte, 0, len(rows)*(usualID+2+8+8))
	for i, at := range byPlace(rows) {
		r := &rows[at]
		head := `,"(`
		if i == 0 {
			head = `{"(`
		}
		places = strconv.AppendUint(append(places, head...), uint64(r.CTID.block), 10)
		places = strconv.AppendUint(append(places, ','), uint64(r.CTID.item), 10)
		places = append(places, `)"`...)
		identities = append(identities, r.MessageID...)
		identities = binary.BigEndian.AppendUint16(identities, uint16(r.Lane))
		identities = binary.BigEndian.AppendUint64(identities, uint64(r.ID))
		identities = binary.BigEndian.AppendUint64(identities, uint64(r.CreatedAt.UnixMicro()-postgresEpoch))
	}
	digest := sha256.Sum256(identities)
	return []any{string(append(places, '}')), digest[:]}
}

// byPlace returns the indices of rows, of which there are at most mostSwept, sorted by
// place. Sorting numbers is several times as fast as sorting rows.
func byPlace(rows []Ref) []uint16 {
	keys := make([]uint64, len(rows))
	for i, r := range rows {
		keys[i] = uint64(r.CTID.block)<<32 | uint64(r.CTID.item)<<16 | uint64(i)
	}
	slices.Sort(keys)
	order := make([]uint16, len(rows))
	for i, key := range keys {
		order[i] = uint16(key)
	}
	return order
}

// reportMissed logs rows that a broken history did not keep.
func reportMissed(ctx context.Context, log *slog.Logger, removed int, broken error) {
	if removed > 0 {
		log.ErrorContext(ctx, "delivered messages are removed without being kept in the history", "rows", removed, "error", broken)
	}
}

// removeArgs encodes the four arrays as text: every driver sends a string for a
// parameter of any type. Times are microseconds, which are exact, and cheaper for both
// sides than dates. The rows are sorted by id.
func removeArgs(rows []Ref) []any {
	var lanes, ids, times []byte
	messageIDs := make([]string, len(rows))
	for i, r := range rows {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		lanes = strconv.AppendInt(append(lanes, sep), int64(r.Lane), 10)
		ids = strconv.AppendInt(append(ids, sep), r.ID, 10)
		times = strconv.AppendInt(append(times, sep), r.CreatedAt.UnixMicro(), 10)
		messageIDs[i] = r.MessageID
	}
	return []any{string(append(lanes, '}')), string(append(ids, '}')), pq.Array(messageIDs), string(append(times, '}'))}
}
