package relaystore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/lib/pq"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// Keys implements [Retries].
func (s *postgres) Keys(ctx context.Context, lanes []int) (keys []Key, err error) {
	err = s.within(ctx, func(tx *sql.Tx) error {
		keys, err = scanKeys(tx.QueryContext(ctx, s.q.Keys, smallints(lanes)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read retrying keys: %w", err)
	}
	return keys, nil
}

// Due implements [Retries].
func (s *postgres) Due(ctx context.Context, r DueRequest) (found Due, err error) {
	err = s.within(ctx, func(tx *sql.Tx) error {
		topics, err := scanTopics(tx.QueryContext(ctx, s.q.TopicsDue, smallints(r.Lanes), r.AfterTopic, r.Topics))
		if err != nil {
			return fmt.Errorf("read topics of retrying messages: %w", err)
		}
		due, chosen := r.choose(topics)
		found = chosen
		if len(due) == 0 {
			return nil
		}
		lanes, names := make([]int, len(due)), make([]string, len(due))
		for i, t := range due {
			lanes[i], names[i] = t.lane, t.topic
		}
		ids, created := knownArrays(r.Known)
		rows, next, err := scanDue(tx.QueryContext(ctx, s.q.Due,
			smallints(lanes), ids, r.Heads+1, r.Rows, keyBytes, pq.Array(names), created, r.Bytes, r.mostInline(), rowBytes, r.mostHead()))
		if err != nil {
			return fmt.Errorf("read due messages: %w", err)
		}
		found.Rows = rows
		found.sooner(next)
		return nil
	})
	if err != nil {
		return Due{}, err
	}
	return found, nil
}

// ReadPiece implements [Retries].
func (s *postgres) ReadPiece(ctx context.Context, of outboxstore.Ref, offset, most int) ([]byte, error) {
	return scanPiece(s.db.QueryRowContext(ctx, s.q.ReadPiece, refArgs(of, offset+1, most, of.CTID.String())...))
}

// FindOtherTopics implements [Retries].
func (s *postgres) FindOtherTopics(ctx context.Context, lanes []int, topics []string, rows int) (map[int]int64, error) {
	found, err := scanLanes(s.db.QueryContext(ctx, s.q.FindOtherTopics, smallints(lanes), pq.Array(topics), rows))
	if err != nil {
		return nil, fmt.Errorf("look for other topics: %w", err)
	}
	return found, nil
}

// Find implements [Retries].
func (s *postgres) Find(ctx context.Context, lane int, id int64) (row Row, retrying, found bool, err error) {
	return scanFound(s.db.QueryRowContext(ctx, s.q.Find, lane, id))
}

// Commands implements [Retries].
func (s *postgres) Commands(ctx context.Context, lanes []int, limit int) ([]Command, error) {
	var found []Command
	err := s.within(ctx, func(tx *sql.Tx) (err error) {
		found, err = scanCommands(tx.QueryContext(ctx, s.q.Commands, smallints(lanes), limit))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read commands: %w", err)
	}
	return found, nil
}
