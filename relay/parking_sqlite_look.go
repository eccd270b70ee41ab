package relay

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/sqlitetx"
)

func (s *sqliteParking) parkedKeys(ctx context.Context, lanes []int) ([]parkedKey, error) {
	keys, err := scanKeys(s.db.QueryContext(ctx, s.t.keys, jsonArray(lanes)))
	if err != nil {
		return nil, fmt.Errorf("read parked keys: %w", err)
	}
	return unique(keys), nil
}

// sqliteHead is the first row of a key.
type sqliteHead struct {
	lane  int
	id    int64
	key   string
	wait  int64
	topic string
	turn  int // among those of its topic
}

func (s *sqliteParking) look(ctx context.Context, r dueRequest) (found looked, err error) {
	known := make(map[rowID]bool, len(r.known))
	for _, k := range r.known {
		known[rowID{k.ID, k.CreatedAt.UnixMicro()}] = true
	}
	err = sqlitetx.Read(ctx, s.db, func(conn *sql.Conn) error {
		topics, err := scanTopics(conn.QueryContext(ctx, s.t.topics, jsonArray(r.lanes), r.after, r.most))
		if err != nil {
			return err
		}
		var due []parkedTopic
		due, found = r.choose(topics)
		heads, err := s.readHeads(ctx, conn, r, due, known)
		if err != nil {
			return err
		}
		for i, h := range heads {
			if h.wait > 0 || i == r.heads {
				found.sooner(max(0, micros(h.wait)))
				return nil
			}
			most := r.rows
			if h.key == "" {
				most = 1
			}
			left := r.bytes - bytesOf(found.rows)
			if left <= 0 {
				return nil
			}
			if found.rows, err = s.appendRows(ctx, conn, found.rows, h, known, most, min(left, parkedBytes)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return looked{}, fmt.Errorf("read what is due of parked: %w", err)
	}
	return found, nil
}

// readHeads returns the first rows of due keys, at most one more than asked for. Topics
// take turns.
func (s *sqliteParking) readHeads(ctx context.Context, conn *sql.Conn, r dueRequest, due []parkedTopic, known map[rowID]bool) (heads []sqliteHead, err error) {
	for _, topic := range due {
		if heads, err = s.appendHeads(ctx, conn, heads, topic, known, r.heads+1); err != nil {
			return nil, err
		}
	}
	byTime := func(a, b sqliteHead) int { return cmp.Or(cmp.Compare(a.wait, b.wait), cmp.Compare(a.id, b.id)) }
	slices.SortFunc(heads, byTime)
	turns := map[string]int{}
	for i := range heads {
		h := &heads[i]
		turns[h.topic]++
		if h.turn = turns[h.topic]; h.wait > 0 {
			h.turn = math.MaxInt // what is not due comes last
		}
	}
	slices.SortFunc(heads, func(a, b sqliteHead) int { return cmp.Or(cmp.Compare(a.turn, b.turn), byTime(a, b)) })
	return heads[:min(len(heads), r.heads+1)], nil
}

// appendHeads appends the due first rows of keys of a topic, except those known, and
// the first that is not due.
func (s *sqliteParking) appendHeads(ctx context.Context, conn *sql.Conn, heads []sqliteHead, topic parkedTopic, known map[rowID]bool, most int) ([]sqliteHead, error) {
	rows, err := conn.QueryContext(ctx, s.t.heads, topic.lane, topic.topic)
	if err != nil {
		return nil, err
	}
	err = each(rows, func(row *sql.Rows) (bool, error) {
		var h sqliteHead
		var created int64
		if err := row.Scan(&h.lane, &h.id, &h.key, &h.wait, &created); err != nil {
			return false, err
		}
		if known[rowID{h.id, created}] {
			return true, nil
		}
		h.topic = topic.topic
		heads = append(heads, h)
		most--
		return most > 0 && h.wait <= 0, nil
	})
	return heads, err
}

// appendRows appends a head and the rows that follow it, except those known, up to the
// limits on rows and bytes.
func (s *sqliteParking) appendRows(ctx context.Context, conn *sql.Conn, due []parkedRow, h sqliteHead, known map[rowID]bool, most, mostBytes int) ([]parkedRow, error) {
	rows, err := conn.QueryContext(ctx, s.t.rows, h.lane, h.key, h.id)
	if err != nil {
		return nil, err
	}
	bytes := 0
	err = each(rows, func(row *sql.Rows) (bool, error) {
		var r parkedRow
		var created, age int64
		var held bool
		if err := row.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &created,
			&r.attempts, &r.tried, &r.crashed, &r.unanswered, &held, &age); err != nil || held {
			return false, err // behind a held row nothing may be published
		}
		if known[rowID{r.ID, created}] {
			return true, nil
		}
		r.CreatedAt, r.age = time.UnixMicro(created).UTC(), micros(age)
		due = append(due, r)
		most--
		bytes += rowBytes + len(r.Payload) + len(r.Metadata)
		return most > 0 && bytes < mostBytes, nil
	})
	return due, err
}

func (s *sqliteParking) piece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
	return scanPiece(s.db.QueryRowContext(ctx, s.t.piece, refArgs(of, offset+1, most)...))
}

func (s *sqliteParking) beyond(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
	known, found := jsonArray(topics), map[int]int64{}
	for _, lane := range lanes {
		var id int64
		switch err := s.db.QueryRowContext(ctx, s.t.beyond, lane, known, rows).Scan(&id); {
		case err == nil:
			found[lane] = id
		case !errors.Is(err, sql.ErrNoRows):
			return nil, fmt.Errorf("look for other topics: %w", err)
		}
	}
	return found, nil
}

func (s *sqliteParking) find(ctx context.Context, lane int, id int64) (row parkedRow, parked, found bool, err error) {
	row, parked, found, err = scanFound(s.db.QueryRowContext(ctx, s.t.find, lane, id))
	if err != nil {
		return row, false, false, fmt.Errorf("find row: %w", err)
	}
	return row, parked, found, nil
}

func (s *sqliteParking) commands(ctx context.Context, lanes []int, limit int) ([]command, error) {
	if len(lanes) == 0 {
		return nil, nil
	}
	args := []any{limit}
	for _, lane := range lanes {
		args = append(args, lane)
	}
	found, err := scanCommands(s.db.QueryContext(ctx, s.commandTexts[len(lanes)], args...))
	if err != nil {
		return nil, fmt.Errorf("read commands: %w", err)
	}
	return found, nil
}
