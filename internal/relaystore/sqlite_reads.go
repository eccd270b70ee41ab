package relaystore

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

// Keys implements [Retries].
func (s *sqlite) Keys(ctx context.Context, lanes []int) ([]Key, error) {
	keys, err := scanKeys(s.db.QueryContext(ctx, s.q.Keys, jsonArray(lanes)))
	if err != nil {
		return nil, fmt.Errorf("read retrying keys: %w", err)
	}
	return keys, nil
}

// rowID is the identity of a row in its lane.
type rowID struct{ id, created int64 }

// sqliteHead is the first row of a key.
type sqliteHead struct {
	lane  int
	id    int64
	key   string
	wait  int64
	topic string
	turn  int // among those of its topic
}

// Due implements [Retries].
func (s *sqlite) Due(ctx context.Context, r DueRequest) (found Due, err error) {
	known := make(map[rowID]bool, len(r.Known))
	for _, k := range r.Known {
		known[rowID{k.ID, k.CreatedAt.UnixMicro()}] = true
	}
	err = sqlitetx.Read(ctx, s.db, func(conn *sql.Conn) error {
		topics, err := scanTopics(conn.QueryContext(ctx, s.q.TopicsDue, jsonArray(r.Lanes), r.AfterTopic, r.Topics))
		if err != nil {
			return err
		}
		var due []topicDue
		due, found = r.choose(topics)
		heads, err := s.readHeads(ctx, conn, r, due, known)
		if err != nil {
			return err
		}
		for i, h := range heads {
			if h.wait > 0 || i == r.Heads {
				found.sooner(max(0, micros(h.wait)))
				return nil
			}
			most := r.Rows
			if h.key == "" {
				most = 1
			}
			left := r.Bytes - found.Size()
			if left <= 0 {
				return nil
			}
			if found.Rows, err = s.appendRows(ctx, conn, found.Rows, h, known, most, min(left, keyBytes)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return Due{}, fmt.Errorf("read due messages: %w", err)
	}
	return found, nil
}

// readHeads returns the first rows of due keys, at most one more than asked for. Topics
// take turns.
func (s *sqlite) readHeads(ctx context.Context, conn *sql.Conn, r DueRequest, due []topicDue, known map[rowID]bool) (heads []sqliteHead, err error) {
	for _, topic := range due {
		if heads, err = s.appendHeads(ctx, conn, heads, topic, known, r.Heads+1); err != nil {
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
	return heads[:min(len(heads), r.Heads+1)], nil
}

// appendHeads appends the due first rows of keys of a topic, except those known, and
// the first that is not due.
func (s *sqlite) appendHeads(ctx context.Context, conn *sql.Conn, heads []sqliteHead, topic topicDue, known map[rowID]bool, most int) ([]sqliteHead, error) {
	rows, err := conn.QueryContext(ctx, s.q.Heads, topic.lane, topic.topic)
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
func (s *sqlite) appendRows(ctx context.Context, conn *sql.Conn, due []Row, h sqliteHead, known map[rowID]bool, most, mostBytes int) ([]Row, error) {
	rows, err := conn.QueryContext(ctx, s.q.Rows, h.lane, h.key, h.id)
	if err != nil {
		return nil, err
	}
	bytes := 0
	err = each(rows, func(row *sql.Rows) (bool, error) {
		var r Row
		var created, age, late int64
		var held bool
		if err := row.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &r.Payload, &r.Metadata, &created,
			&r.Attempts, &r.Tried, &r.Crashed, &r.Unanswered, &held, &age, &late); err != nil || held {
			return false, err // behind a held row nothing may be published
		}
		if known[rowID{r.ID, created}] {
			return true, nil
		}
		r.CreatedAt, r.Age, r.Late = time.UnixMicro(created).UTC(), micros(age), micros(late)
		due = append(due, r)
		most--
		bytes += rowBytes + len(r.Payload) + len(r.Metadata)
		return most > 0 && bytes < mostBytes, nil
	})
	return due, err
}

// ReadPiece implements [Retries].
func (s *sqlite) ReadPiece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
	return scanPiece(s.db.QueryRowContext(ctx, s.q.ReadPiece, refArgs(of, offset+1, most)...))
}

// FindOtherTopics implements [Retries].
func (s *sqlite) FindOtherTopics(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
	known, found := jsonArray(topics), map[int]int64{}
	for _, lane := range lanes {
		var id int64
		switch err := s.db.QueryRowContext(ctx, s.q.FindOtherTopics, lane, known, rows).Scan(&id); {
		case err == nil:
			found[lane] = id
		case !errors.Is(err, sql.ErrNoRows):
			return nil, fmt.Errorf("look for other topics: %w", err)
		}
	}
	return found, nil
}

// Find implements [Retries].
func (s *sqlite) Find(ctx context.Context, lane int, id int64) (row Row, retrying, found bool, err error) {
	return scanFound(s.db.QueryRowContext(ctx, s.q.Find, lane, id))
}

// Commands implements [Retries].
func (s *sqlite) Commands(ctx context.Context, lanes []int, limit int) ([]Command, error) {
	found, err := scanCommands(s.db.QueryContext(ctx, s.q.Commands, jsonArray(lanes), limit))
	if err != nil {
		return nil, fmt.Errorf("read commands: %w", err)
	}
	return found, nil
}
