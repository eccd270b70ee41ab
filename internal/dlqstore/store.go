package dlqstore

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/database"
)

// session is the pool, or a transaction.
type session interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// store is what the databases have in common.
type store struct {
	db   *sql.DB
	text texts

	write   func(ctx context.Context, do func(session) error) error // runs one writing statement
	ids     func([]int64) any                                       // as an argument
	strings func([]string) any                                      // as an argument
}

func (s *store) Get(ctx context.Context, id int64) (*Letter, error) {
	return orNotFound(scanLetter(s.db.QueryRowContext(ctx, s.text.Get, id), true))
}

func (s *store) CheckReplay(ctx context.Context, id int64, token string) (*Letter, error) {
	return orNotFound(scanLetter(s.db.QueryRowContext(ctx, s.text.CheckReplay, id, token), true))
}

func (s *store) ReplayToken(ctx context.Context, id int64) (token string, err error) {
	err = s.db.QueryRowContext(ctx, s.text.ReplayToken, id).Scan(&token)
	return orNotFound(token, err)
}

func orNotFound[T any](found T, err error) (T, error) {
	if errors.Is(err, sql.ErrNoRows) {
		return found, ErrNotFound
	}
	return found, err
}

func (s *store) States(ctx context.Context, ids []int64) (map[int64]string, error) {
	states := map[int64]string{}
	err := each(ctx, s.db, func(rows *sql.Rows) error {
		var id int64
		var state string
		if err := rows.Scan(&id, &state); err != nil {
			return err
		}
		states[id] = state
		return nil
	}, s.text.States, s.ids(ids))
	return states, err
}

func (s *store) CountOpen(ctx context.Context, most int) (counts []OpenCount, err error) {
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var c OpenCount
		var age int64
		err := rows.Scan(&c.State, &c.Source, &c.Consumer, &c.N, &age)
		c.Oldest = time.Duration(age) * time.Microsecond
		counts = append(counts, c)
		return err
	}, s.text.CountOpen, most)
	return counts, err
}

func (s *store) Groups(ctx context.Context, look, most int) (groups []Group, err error) {
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var g Group
		var first, last int64
		err := rows.Scan(&g.Fingerprint, &g.N, &first, &last, &g.Newest, &g.Source, &g.Consumer, &g.Topic, &g.Reason, &g.Error)
		g.First, g.Last = time.UnixMicro(first).UTC(), time.UnixMicro(last).UTC()
		groups = append(groups, g)
		return err
	}, s.text.Groups, look, most)
	return groups, err
}

func (s *store) Replay(ctx context.Context, ids []int64, by, reason string) ([]int64, error) {
	return s.act(ctx, s.text.Replay, ids, by, reason)
}

func (s *store) Discard(ctx context.Context, ids []int64, by, reason string) ([]int64, error) {
	return s.act(ctx, s.text.Discard, ids, by, reason)
}

func (s *store) act(ctx context.Context, text string, ids []int64, by, reason string) (accepted []int64, err error) {
	err = s.write(ctx, func(via session) error {
		accepted = nil
		return each(ctx, via, func(rows *sql.Rows) error {
			var id int64
			err := rows.Scan(&id)
			accepted = append(accepted, id)
			return err
		}, text, s.ids(ids), Clean(by), Clean(reason))
	})
	return accepted, err
}

func (s *store) Add(ctx context.Context, tx oncemill.Tx, l *Letter) error {
	metadata, err := encodeMetadata(l.Metadata)
	if err != nil {
		return err
	}
	attempts, err := encodeAttempts(l.Attempts)
	if err != nil {
		return err
	}
	text, reason := Clean(l.Error), Clean(l.Reason)
	_, err = tx.ExecContext(ctx, s.text.Add, Clean(l.Consumer), Clean(l.Topic), Clean(l.MessageID), Clean(l.Key), notNull(l.Payload), metadata,
		reason, text, Clean(l.Stack), min(max(1, l.Tries), math.MaxInt32), string(attempts), traceID(l.Metadata),
		Fingerprint(l.Consumer, reason, text, l.MessageID), micros(l.CreatedAt))
	return err
}

func (s *store) EndReplay(ctx context.Context, tx oncemill.Tx, consumer string, id int64, token string, payload []byte) (ended bool, err error) {
	n, err := database.Affected(tx.ExecContext(ctx, s.text.EndReplay, id, consumer, token, notNull(payload)))
	return n == 1, err
}

func notNull(payload []byte) []byte {
	if payload == nil {
		return []byte{}
	}
	return payload
}

// each calls scan for each row of a query.
func each(ctx context.Context, via session, scan func(*sql.Rows) error, query string, args ...any) error {
	rows, err := via.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}
