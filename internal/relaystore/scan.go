package relaystore

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// collect reads all rows of a query. A commit may fail after its rows were sent, so it
// returns none with an error.
func collect[T any](rows *sql.Rows, err error, scan func(row *sql.Rows, into *T) error) (all []T, _ error) {
	if err != nil {
		return nil, err
	}
	err = each(rows, func(row *sql.Rows) (bool, error) {
		var one T
		err := scan(row, &one)
		all = append(all, one)
		return true, err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// each calls take for rows until it wants no more.
func each(rows *sql.Rows, take func(row *sql.Rows) (more bool, err error)) error {
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		if more, err := take(rows); err != nil || !more {
			return err
		}
	}
	return rows.Err()
}

// scanLanes reads pairs of a lane and a number.
func scanLanes(rows *sql.Rows, err error) (map[int]int64, error) {
	lanes := map[int]int64{}
	_, err = collect(rows, err, func(row *sql.Rows, lane *int) error {
		var n int64
		err := row.Scan(lane, &n)
		lanes[*lane] = n
		return err
	})
	if err != nil {
		return nil, err
	}
	return lanes, nil
}

func scanHeld(rows *sql.Rows, err error) (map[int]Renewal, error) {
	held := map[int]Renewal{}
	_, err = collect(rows, err, func(row *sql.Rows, r *Renewal) error {
		var lane int
		err := row.Scan(&lane, &r.Epoch, &r.Renewed)
		held[lane] = *r
		return err
	})
	if err != nil {
		return nil, err
	}
	return held, nil
}

func scanTaken(rows *sql.Rows, err error) (map[int]Taken, error) {
	taken := map[int]Taken{}
	_, err = collect(rows, err, func(row *sql.Rows, t *Taken) error {
		var lane int
		var unsure int64
		err := row.Scan(&lane, &t.Epoch, &t.Crashes, &t.Alone, &unsure)
		if unsure != 0 {
			t.UnsureUntil = time.UnixMicro(unsure)
		}
		taken[lane] = *t
		return err
	})
	if err != nil {
		return nil, err
	}
	return taken, nil
}

// workerRow is the lane of a worker in the result of a census.
const workerRow = -2

// scanCensus reads leases and workers from one result.
func scanCensus(rows *sql.Rows, err error) (leases []Lease, workers []Worker, _ error) {
	_, err = collect(rows, err, func(row *sql.Rows, l *Lease) error {
		var w Worker
		var left int64
		if err := row.Scan(&l.Lane, &l.Owner, &l.Epoch, &left, &l.Until, &w.Ready, &w.Stopping); err != nil {
			return err
		}
		if l.Lane == workerRow {
			w.Owner, w.Until = l.Owner, l.Until
			workers = append(workers, w)
			return nil
		}
		l.Left = micros(left)
		leases = append(leases, *l)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	return leases, workers, nil
}

// scanKeys reads (lane, key) pairs. A key may have a head and a held row behind it: it
// is returned once.
func scanKeys(rows *sql.Rows, err error) ([]Key, error) {
	keys, err := collect(rows, err, func(row *sql.Rows, k *Key) error { return row.Scan(&k.Lane, &k.Key) })
	seen := make(map[Key]bool, len(keys))
	return slices.DeleteFunc(keys, func(k Key) bool {
		before := seen[k]
		seen[k] = true
		return before
	}), err
}

// scanKeyStates reads keys, with whether they have rows in parked.
func scanKeyStates(rows *sql.Rows, err error) (retrying, ended []Key, _ error) {
	_, err = collect(rows, err, func(row *sql.Rows, k *Key) error {
		var there bool
		err := row.Scan(&k.Lane, &k.Key, &there)
		if there {
			retrying = append(retrying, *k)
		} else {
			ended = append(ended, *k)
		}
		return err
	})
	return retrying, ended, err
}

func scanCommands(rows *sql.Rows, err error) ([]Command, error) {
	return collect(rows, err, func(row *sql.Rows, c *Command) error { return row.Scan(&c.DeadLetter, &c.Lane, &c.Key) })
}

// scanFound reads the one row that Find returns.
func scanFound(row *sql.Row) (r Row, retrying, found bool, err error) {
	var created, age int64
	err = row.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &created,
		&r.Attempts, &r.Tried, &r.Crashed, &r.Unanswered, &age, &retrying)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Row{}, false, false, nil
	case err != nil:
		return Row{}, false, false, fmt.Errorf("find row: %w", err)
	}
	r.CreatedAt, r.Age = time.UnixMicro(created).UTC(), micros(age)
	return r, retrying, true, nil
}

// scanPiece reads a piece of a payload.
func scanPiece(row *sql.Row) (piece []byte, err error) {
	if err = row.Scan(&piece); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a retrying message: %w", err)
	}
	return piece, nil
}

// fenced returns ErrFenced for an update of a lease that changed nothing.
func fenced(result sql.Result) error {
	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		err = ErrFenced
	}
	return err
}

// refArgs are the parameters of a statement that matches a row by its identity.
func refArgs(r outboxstore.Ref, more ...any) []any {
	return append([]any{r.Lane, r.ID, r.MessageID, r.CreatedAt.UnixMicro()}, more...)
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
