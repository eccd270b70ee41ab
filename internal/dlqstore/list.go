package dlqstore

import (
	"context"
	"database/sql"
	"time"
)

// Filter selects dead letters. Empty fields match everything.
type Filter struct {
	States      []string
	Source      string
	Consumer    string
	Topic       string
	Key         string
	MessageID   string
	Reason      string
	Fingerprint string

	From  time.Time // died at or after; zero: any
	Until time.Time // died before; zero: any

	OldestFirst bool
	Limit       int
	AfterDiedAt time.Time // with AfterID, the dead letter after which the list begins; both zero: at its start
	AfterID     int64
}

// lists are the statements of a list by one index.
type lists struct{ newest, oldest string }

// by returns the statements by the index that admits the fewest dead letters.
func (t *texts) by(f *Filter) lists {
	switch {
	case f.MessageID != "":
		return lists{t.NewestByMessage, t.OldestByMessage}
	case f.Key != "":
		return lists{t.NewestByKey, t.OldestByKey}
	case f.Fingerprint != "":
		return lists{t.NewestByFingerprint, t.OldestByFingerprint}
	case len(f.States) == 1 && (f.States[0] == "replaying" || f.States[0] == "discarding"): // few are in it at a time
		return lists{t.NewestByState, t.OldestByState}
	case f.Consumer != "":
		return lists{t.NewestByConsumer, t.OldestByConsumer}
	case f.Topic != "":
		return lists{t.NewestByTopic, t.OldestByTopic}
	case len(f.States) == 1:
		return lists{t.NewestByState, t.OldestByState}
	}
	return lists{t.NewestByTime, t.OldestByTime}
}

func (s *store) List(ctx context.Context, f Filter) ([]*Letter, error) { return s.list(ctx, s.db, f) }

func (s *store) list(ctx context.Context, via session, f Filter) ([]*Letter, error) {
	by := s.text.by(&f)
	text, start := by.newest, int64(lastMicros)
	if f.OldestFirst {
		text, start = by.oldest, firstMicros
	}
	if !f.AfterDiedAt.IsZero() || f.AfterID != 0 {
		start = f.AfterDiedAt.UnixMicro()
	}
	var letters []*Letter
	err := each(ctx, via, func(rows *sql.Rows) error {
		l, err := scanLetter(rows, false)
		letters = append(letters, l)
		return err
	}, text, f.Limit, s.strings(f.States),
		f.Source, f.Consumer, f.Topic, f.Key, f.MessageID, f.Reason, f.Fingerprint,
		microsOr(f.From, firstMicros), microsOr(f.Until, lastMicros), start, f.AfterID)
	if err != nil {
		return nil, err
	}
	return letters, nil
}

// The years 1 and 9999, in microseconds since 1970.
const (
	firstMicros = -62135596800000000
	lastMicros  = 253402300799999999
)

func microsOr(t time.Time, otherwise int64) int64 {
	if t.IsZero() {
		return otherwise
	}
	return t.UnixMicro()
}
