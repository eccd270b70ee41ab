package dlqstore

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/auditstore"
	"github.com/oncemill/oncemill/internal/database"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/text"
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

	audit   auditstore.Store
	write   func(ctx context.Context, do func(*sql.Tx) error) error // runs an act
	ids     func([]int64) any                                       // as an argument
	strings func([]string) any                                      // as an argument
}

func (s *store) Get(ctx context.Context, id int64) (*Letter, error) {
	l, err := orNotFound(scanLetter(s.db.QueryRowContext(ctx, s.text.Get, id), true))
	if err != nil || l.State != "replayed" || l.ActedAt.IsZero() {
		return l, err
	}
	err = s.db.QueryRowContext(ctx, s.text.FailedAgain, l.ReplayID(), l.ActedAt.UnixMicro(), id, l.Source, l.Consumer, l.Lane, l.RowID).Scan(&l.FailedAgain)
	if errors.Is(err, sql.ErrNoRows) {
		return l, nil
	}
	return l, err
}

func (s *store) Now(ctx context.Context) (time.Time, error) {
	var now int64
	err := s.db.QueryRowContext(ctx, s.text.Now).Scan(&now)
	return time.UnixMicro(now).UTC(), err
}

func (s *store) CheckReplay(ctx context.Context, id int64, token string) (*Letter, error) {
	return orNotFound(scanLetter(s.db.QueryRowContext(ctx, s.text.CheckReplay, id, token), true))
}

func (s *store) FormerReplay(ctx context.Context, id int64, token string) (*Letter, error) {
	l := &Letter{ID: id}
	var encoded []byte
	if _, err := orNotFound(l, s.db.QueryRowContext(ctx, s.text.FormerReplay, id, token).Scan(&l.Consumer, &l.MessageID, &encoded)); err != nil {
		return nil, err
	}
	l.Metadata, _ = outboxstore.DecodeMetadata(encoded) // as in scanLetter
	return l, nil
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

func (s *store) CountOpen(ctx context.Context, most int) ([]OpenCount, error) {
	return s.count(ctx, s.text.CountOpen, most)
}

func (s *store) Stuck(ctx context.Context, wait time.Duration, most int) ([]OpenCount, error) {
	return s.count(ctx, s.text.Stuck, most, wait.Microseconds())
}

func (s *store) count(ctx context.Context, query string, args ...any) (counts []OpenCount, err error) {
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var c OpenCount
		var age int64
		err := rows.Scan(&c.State, &c.Source, &c.Consumer, &c.N, &age)
		c.Oldest = time.Duration(age) * time.Microsecond
		counts = append(counts, c)
		return err
	}, query, args...)
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

func (s *store) Add(ctx context.Context, tx oncemill.Tx, l *Letter) error {
	metadata, err := encodeMetadata(l.Metadata)
	if err != nil {
		return err
	}
	attempts, err := encodeAttempts(l.Attempts)
	if err != nil {
		return err
	}
	failure, reason := text.Clean(l.Error), text.Clean(l.Reason)
	_, err = tx.ExecContext(ctx, s.text.Add, text.Clean(l.Consumer), text.Clean(l.Topic), text.Clean(l.MessageID), text.Clean(l.Key), notNull(l.Payload), metadata,
		reason, failure, text.Clean(l.Stack), min(max(1, l.Tries), math.MaxInt32), string(attempts), traceID(l.Metadata),
		Fingerprint(l.Consumer, reason, failure, l.MessageID), micros(l.CreatedAt))
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
