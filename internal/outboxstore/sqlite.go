package outboxstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/sqlitetx"
	"github.com/oncemill/oncemill/internal/turn"
)

type sqliteStore struct {
	db      *sql.DB
	history time.Duration // 0: none
	ask     bool          // Config.Archive decides what is removed
	log     *slog.Logger
	names   database.Database

	readTexts            [Lanes + 1]string // by the number of lanes
	moveText, removeText string
	readPieceText        string
}

func newSQLiteStore(db *sql.DB, names database.Database, history time.Duration, ask bool, log *slog.Logger) *sqliteStore {
	s := &sqliteStore{
		db: db, history: history, ask: ask, log: log, names: names,
		moveText:   names.Expand(sqliteMove),
		removeText: names.Expand(sqliteRemove),

		readPieceText: names.Expand(sqliteReadPiece),
	}
	for n := 1; n <= Lanes; n++ {
		parts := make([]string, n)
		for i := range parts {
			parts[i] = strings.ReplaceAll(names.Expand(sqliteReadLane), "?lane", fmt.Sprintf("?%d", 5+i))
		}
		s.readTexts[n] = strings.Join(parts, "\nunion all")
	}
	return s
}

// Served by the index (lane, id). One limited subselect for each lane: a window
// function over all lanes at once took forty times as long. ?1 is the number of rows,
// ?2 the known rows, ?3 the busy keys, ?4 the topics whose rows come hollow, as JSON. A
// pair that is "not in" a list is compared with each of its elements, since one might
// be null; a pair that is "in" it is looked up.
const sqliteReadLane = `
select * from (
	select lane, id, topic, message_id, key, created_at, hollow, iif(hollow, null, payload), iif(hollow, null, metadata)
	from (select *, topic in (select value from json_each(?4)) as hollow from {{outbox}})
	where lane = ?lane
		and case when (id, created_at) in (select cast(key as integer), value from json_each(?2)) then false else true end
		and key not in (select value from json_each(?3))
	order by id
	limit ?1
)`

// knownObject returns {"id": microseconds, ...}: SQLite takes six times as long to
// extract pairs from an array.
func knownObject(known []Known) string {
	object := []byte{'{'}
	for i, k := range known {
		if i > 0 {
			object = append(object, ',')
		}
		object = append(strconv.AppendInt(append(object, '"'), k.ID, 10), `":`...)
		object = strconv.AppendInt(object, k.CreatedAt.UnixMicro(), 10)
	}
	return string(append(object, '}'))
}

func (s *sqliteStore) Read(ctx context.Context, req ReadRequest) ([]Row, error) {
	if len(req.Lanes) == 0 {
		return nil, nil
	}
	args := []any{req.Rows, knownObject(req.Known)}
	for _, list := range [][]string{orEmpty(req.Busy), orEmpty(req.Hollow)} {
		text, err := json.Marshal(list)
		if err != nil {
			return nil, fmt.Errorf("read lanes: %w", err)
		}
		args = append(args, string(text))
	}
	for _, l := range req.Lanes {
		args = append(args, l)
	}
	rows, err := s.query(ctx, s.readTexts[len(req.Lanes)], args, req.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read lanes: %w", err)
	}
	return rows, nil
}

const sqliteReadPiece = `
select substr(payload, ?5, ?6) from {{outbox}} where lane = ?1 and id = ?2 and created_at = ?3 and message_id = ?4`

// Reads on SQLite always include the payload.
func (s *sqliteStore) ReadPiece(ctx context.Context, of Ref, offset, most int) (piece []byte, err error) {
	err = s.db.QueryRowContext(ctx, s.readPieceText, of.Lane, of.ID, of.CreatedAt.UnixMicro(), of.MessageID, offset+1, most).Scan(&piece)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a message: %w", err)
	}
	return piece, nil
}

// query returns the rows of a statement that reads lanes, up to most bytes of each.
func (s *sqliteStore) query(ctx context.Context, text string, args []any, most int) (out []Row, err error) {
	rows, err := s.db.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	lane, bytes := -1, 0
	for rows.Next() {
		var r Row
		var micros int64
		if err := rows.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &micros, &r.Hollow, &r.Payload, &r.Metadata); err != nil {
			return nil, err
		}
		if r.Lane != lane {
			lane, bytes = r.Lane, 0
		}
		// Skip the rest of the lane here rather than in SQL: the rows come from this
		// process's own page cache.
		if bytes >= most && bytes > 0 {
			continue
		}
		bytes += len(r.Payload) + len(r.Metadata)
		r.CreatedAt = time.UnixMicro(micros).UTC()
		if !r.Hollow { // the driver returns nil for empty
			r.Payload, r.Metadata = orEmpty(r.Payload), orEmpty(r.Metadata)
		}
		out = append(out, r)
	}
	return out, rows.Err()
}

// Served by the primary key. SQLite has one writer at a time, so the copy and the
// deletion of a row are one move.
const (
	sqliteMove = `
insert into {{outbox_history}} (id, lane, topic, message_id, key, payload, metadata, created_at, relayed_at)
select id, lane, topic, message_id, key, payload, metadata, created_at, cast(unixepoch('subsec') * 1000000 as integer)
from {{outbox}}
where id = ?1 and lane = ?2 and message_id = ?3 and created_at = ?4`

	sqliteRemove = `
delete from {{outbox}}
where id = ?1 and lane = ?2 and message_id = ?3 and created_at = ?4`
)

// remove finds no row locked: SQLite locks whole databases, and only briefly.
func (s *sqliteStore) Remove(ctx context.Context, rows []Ref) (Removal, error) {
	var broken error
	if s.history > 0 {
		_, err := s.removeBy(ctx, rows, s.moveText, s.removeText)
		switch {
		case err == nil:
			return Removal{}, nil
		case inconclusive(ctx, err):
			return Removal{}, fmt.Errorf("move to history: %w", err)
		}
		broken = err // the history must never stop delivery
	}
	removed, err := s.removeBy(ctx, rows, s.removeText)
	if err != nil {
		return Removal{}, fmt.Errorf("delete confirmed: %w", err)
	}
	if broken == nil {
		return Removal{}, nil
	}
	reportMissed(ctx, s.log, int(removed), broken)
	return Removal{Missed: int(removed)}, nil
}

// removeBy executes the texts for each row, in transactions that end when others wait
// for their turn. It returns how many rows the last text has changed.
func (s *sqliteStore) removeBy(ctx context.Context, rows []Ref, texts ...string) (changed int64, err error) {
	err = sqlitetx.WriteSlices(ctx, s.db, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		statements := make([]*sql.Stmt, len(texts))
		for i, text := range texts {
			stmt, err := tx.PrepareContext(ctx, text)
			if err != nil {
				return false, err
			}
			defer stmt.Close() //nolint:errcheck // nothing is left to be told
			statements[i] = stmt
		}
		for ; len(rows) > 0 && !over(); rows = rows[1:] {
			n, err := removeRow(ctx, rows[0], statements)
			if err != nil {
				return false, err
			}
			changed += n
		}
		return len(rows) > 0, nil
	})
	return changed, err
}

// removeRow executes the statements for a row, and returns how many rows the last of
// them has changed.
func removeRow(ctx context.Context, r Ref, statements []*sql.Stmt) (changed int64, err error) {
	for _, stmt := range statements {
		changed, err = affected(stmt.ExecContext(ctx, r.ID, r.Lane, r.MessageID, r.CreatedAt.UnixMicro()))
		if err != nil {
			return 0, err
		}
	}
	return changed, nil
}

const (
	// As on PostgreSQL, ids that no sequence can have given out do not count.
	sqliteHighest = `
select max(
	(select coalesce(max(id), 0) from {{outbox}} where id <= (` + sqliteBound + `)),
	(select coalesce(max(id), 0) from {{outbox_history}} where id <= (` + sqliteBound + `)))`

	sqliteBound = `select min((` + sqliteLast + `), 9223372036854775807 - (1 << 48)) + (1 << 48)`

	sqliteForged = `
select lane, id, message_id from {{outbox}} where id > (` + sqliteBound + `)
union all
select lane, id, message_id from {{outbox_history}} where id > (` + sqliteBound + `)
limit 10`

	// {{outbox}} is quoted; sqlite_sequence holds the bare name.
	sqliteLast = `select coalesce((select seq from sqlite_sequence where '"' || name || '"' = '{{outbox}}'), 0)`

	sqliteRepairDelete = `delete from sqlite_sequence where '"' || name || '"' = '{{outbox}}'`
	sqliteRepairInsert = `insert into sqlite_sequence (name, seq) values (trim('{{outbox}}', '"'), ?1)`
)

func (s *sqliteStore) Check(ctx context.Context) error {
	var last, highest int64
	if err := s.db.QueryRowContext(ctx, s.names.Expand(`select (`+sqliteLast+`), (`+sqliteHighest+`)`)).Scan(&last, &highest); err != nil {
		return fmt.Errorf("check id sequence: %w", err)
	}
	if last < highest {
		return fmt.Errorf("%w (last id given out %d, highest id in use %d)", ErrSequenceBehind, last, highest)
	}
	forged, err := scanForged(s.db.QueryContext(ctx, s.names.Expand(sqliteForged)))
	return reportForged(ctx, s.log, forged, err)
}

func (s *sqliteStore) LastID(ctx context.Context) (last int64, err error) {
	if err := s.db.QueryRowContext(ctx, s.names.Expand(sqliteLast)).Scan(&last); err != nil {
		return 0, fmt.Errorf("read id sequence: %w", err)
	}
	return last, nil
}

func (s *sqliteStore) RepairSequence(ctx context.Context, floor int64) (last int64, err error) {
	err = sqlitetx.Write(ctx, s.db, turn.Caller, func(tx *sql.Tx) error {
		text := s.names.Expand(`select max((` + sqliteLast + `), (` + sqliteHighest + `), ?1)`)
		if err := tx.QueryRowContext(ctx, text, floor).Scan(&last); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, s.names.Expand(sqliteRepairDelete)); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, s.names.Expand(sqliteRepairInsert), last)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("repair sequence: %w", err)
	}
	return last, nil
}

// held: a reader only keeps the log of a SQLite database large.
func (s *sqliteStore) Held(context.Context) (Held, error) { return Held{}, nil }

// Served by the index on relayed_at. A few at a time, by rows and by bytes, so that
// others need not wait for their turn to write.
const sqliteRetire = `
delete from {{outbox_history}}
where rowid in (
	select rowid
	from (
		select
			rowid,
			sum(length(payload) + length(metadata))
				over (order by relayed_at, rowid rows between unbounded preceding and 1 preceding) as bytes_before
		from (
			select rowid, relayed_at, payload, metadata
			from {{outbox_history}}
			where relayed_at < ` + sqliteNow + ` - ?1
			order by relayed_at
			limit ?2
		)
	)
	where coalesce(bytes_before, 0) < ?3
)`

const (
	sqliteRetireRows  = 200
	sqliteRetireBytes = 4 << 20
)

func (s *sqliteStore) Maintain(ctx context.Context, guard Guard) (done Maintained, err error) {
	if s.ask {
		return done, nil
	}
	// Reading needs no turn.
	var expired bool
	if err := s.db.QueryRowContext(ctx, s.names.Expand(sqliteExpired), s.history.Microseconds()).Scan(&expired); err != nil {
		return done, fmt.Errorf("look at the history: %w", err)
	}
	if !expired {
		return done, nil
	}
	_, err = s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (more bool, err error) {
		for !over() {
			retired, err := affected(tx.ExecContext(ctx, s.names.Expand(sqliteRetire), s.history.Microseconds(), sqliteRetireRows, sqliteRetireBytes))
			if err != nil {
				return false, err
			}
			if done.Retired += retired; retired == 0 {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return done, fmt.Errorf("retire history: %w", err)
	}
	return done, nil
}
