package outboxstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"github.com/oncemill/oncemill"
)

const (
	sqliteNow = `cast(unixepoch('subsec') * 1000000 as integer)`

	sqliteSchedule = `insert into {{scheduled}} (lane, topic, message_id, key, payload, metadata, deliver_at) values `

	// Served by the index on message_id.
	sqliteCancel = `delete from {{scheduled}} where message_id = $1`

	// The first entry of the index (deliver_at, seq).
	sqliteNextDue = `select deliver_at - ` + sqliteNow + `, length(payload) + length(metadata) from {{scheduled}} order by deliver_at, seq limit 1`

	// Served by the index (deliver_at, seq). SQLite has one writer at a time: a chosen
	// row still exists when it is moved.
	sqliteChooseDue = `
select seq, length(payload) + length(metadata)
from {{scheduled}}
where deliver_at <= ` + sqliteNow + `
order by deliver_at, seq
limit ?1`

	sqliteMoveDue = `
insert into {{outbox}} (lane, topic, message_id, key, payload, metadata)
select lane, topic, message_id, key, payload, metadata
from {{scheduled}}
where seq in (select value from json_each(?1))
order by deliver_at, seq`

	sqliteForgetDue = `delete from {{scheduled}} where seq in (select value from json_each(?1))`
)

var sqliteScheduleParts = [scheduleColumns + 1]string{
	"(", ", ", ", ", ", ", ", ", ", ",
	", case ", " when 1 then " + sqliteNow + " else 0 end + ", ")",
}

const sqliteScheduleRows = 100 // in process: a statement costs no round trip, and binding is quadratic

func (s *sqliteStore) Schedule(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow) error {
	return scheduleRows(ctx, tx, rows, sqliteScheduleRows, s.names.Expand(sqliteSchedule), sqliteScheduleParts)
}

func (s *sqliteStore) Cancel(ctx context.Context, tx oncemill.ExecTx, messageID string) (int64, error) {
	return affected(tx.ExecContext(ctx, s.names.Expand(sqliteCancel), messageID))
}

func (s *sqliteStore) NextDue(ctx context.Context) (Due, error) {
	return nextDue(s.db.QueryRowContext(ctx, s.names.Expand(sqliteNextDue)))
}

// moveDue moves a few rows at a time, until others wait for their turn to write,
// nothing is due, or one transaction is long enough.
func (s *sqliteStore) MoveDue(ctx context.Context, guard Guard, _ Due) (Moved, error) {
	var moved int
	held, err := s.guarded(ctx, guard, func(tx *sql.Tx, over func() bool) (bool, error) {
		for moved < moveRows && !over() {
			n, err := s.moveSome(ctx, tx)
			if err != nil {
				return false, err
			}
			if moved += n; n < sqliteMoveRows {
				break
			}
		}
		return false, nil // the caller calls again
	})
	if err != nil || !held {
		return Moved{}, err
	}
	return Moved{Rows: moved}, nil
}

// sqliteMoveRows is how many rows a statement moves.
const sqliteMoveRows = 200

// moveSome moves the first due rows, and returns how many.
func (s *sqliteStore) moveSome(ctx context.Context, tx *sql.Tx) (moved int, err error) {
	chosen, err := s.chooseDue(ctx, tx)
	if err != nil || len(chosen) == 0 {
		return 0, err
	}
	list, err := json.Marshal(chosen)
	if err != nil {
		return 0, err
	}
	for _, text := range []string{sqliteMoveDue, sqliteForgetDue} {
		if _, err := tx.ExecContext(ctx, s.names.Expand(text), string(list)); err != nil {
			return 0, err
		}
	}
	return len(chosen), nil
}

// chooseDue returns the first due rows, as many as a statement takes.
func (s *sqliteStore) chooseDue(ctx context.Context, tx *sql.Tx) (chosen []int64, err error) {
	rows, err := tx.QueryContext(ctx, s.names.Expand(sqliteChooseDue), sqliteMoveRows)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for total := int64(0); rows.Next() && total < moveBytes; {
		var seq, bytes int64
		if err := rows.Scan(&seq, &bytes); err != nil {
			return nil, err
		}
		chosen = append(chosen, seq)
		total += bytes
	}
	return chosen, rows.Err()
}
