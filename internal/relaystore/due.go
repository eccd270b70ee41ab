package relaystore

import (
	"cmp"
	"database/sql"
	"math"
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// DueRequest selects what Due returns.
type DueRequest struct {
	Lanes        []int
	Known        []outboxstore.Known // rows to pass over
	ExceptTopics []string            // topics to pass over, with everything that follows in their keys
	AfterTopic   string              // the topic after which to begin
	Topics       int                 // most topics of each lane to look at
	Heads        int                 // most keys
	Rows         int                 // most rows of each key
	Bytes        int                 // most bytes; the last row may exceed them
	Inline       bool                // pass over keys whose head does not come with its payload
}

// mostInline is the largest payload that is returned with its row: it excludes no other
// one, and no answer is too large for its time.
func (r DueRequest) mostInline() int { return r.Bytes / 4 }

// mostHead is the largest payload of a head.
func (r DueRequest) mostHead() int {
	if r.Inline {
		return r.mostInline()
	}
	return math.MaxInt32
}

// Due is what is due.
type Due struct {
	Rows []Row
	Next time.Duration // until the next one is due, of the topics looked at; negative: none is
	More string        // the topic after which to continue; empty: all were looked at
}

// Size returns the bytes of rows as DueRequest.Bytes counts them.
func (d Due) Size() (bytes int) {
	for _, r := range d.Rows {
		bytes += rowBytes + len(r.Payload) + len(r.Metadata)
	}
	return bytes
}

const (
	// keyBytes is how much payload and metadata Due returns of a key, but at least one
	// row.
	keyBytes = 1 << 20

	// rowBytes is the share of a row in DueRequest.Bytes, besides payload and metadata.
	rowBytes = 256
)

// topicDue is a topic of a lane that has heads in parked.
type topicDue struct {
	lane  int
	topic string
	wait  time.Duration // until its first head is due
	nth   int           // among the topics of its lane that were looked at, from 1
}

func scanTopics(rows *sql.Rows, err error) ([]topicDue, error) {
	return collect(rows, err, func(row *sql.Rows, t *topicDue) error {
		var wait int64
		err := row.Scan(&t.lane, &t.topic, &wait, &t.nth)
		t.wait = micros(wait)
		return err
	})
}

// mostTopicsDue bounds the topics of lanes of which Due returns rows.
const mostTopicsDue = 512

// choose returns the topics with due rows, longest waiting first, and the rest of a
// result: where to continue if a lane has more topics than were looked at, and
// when the first of the others is due.
func (r DueRequest) choose(topics []topicDue) (due []topicDue, found Due) {
	found.Next = -1
	for _, t := range topics {
		if t.nth == r.Topics && (found.More == "" || t.topic < found.More) {
			found.More = t.topic
		}
		switch {
		case slices.Contains(r.ExceptTopics, t.topic):
		case t.wait > 0:
			found.sooner(t.wait)
		default:
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b topicDue) int {
		return cmp.Or(cmp.Compare(a.wait, b.wait), cmp.Compare(a.topic, b.topic), cmp.Compare(a.lane, b.lane))
	})
	if len(due) > mostTopicsDue {
		due = due[:mostTopicsDue]
		found.sooner(0)
	}
	return due, found
}

// sooner records that something is due after wait; negative: nothing is.
func (d *Due) sooner(wait time.Duration) {
	if wait >= 0 && (d.Next < 0 || wait < d.Next) {
		d.Next = wait
	}
}

// scanDue reads heads in the order of their times, each with the rows of its key. A
// head that is not due, or one too many, has no rows and shows when to ask again.
// Nothing may be published behind a held row.
func scanDue(rows *sql.Rows, err error) (due []Row, next time.Duration, _ error) {
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err reports it
	next = -1
	barred := int64(0) // the number of a head behind which a row is held
	for rows.Next() {
		var wait, nth int64
		var missing sql.NullInt64
		var lane, id, created, attempts, age, late sql.NullInt64
		var tried, crashed, unanswered, held sql.NullBool
		var topic, message, key sql.NullString
		var payload, metadata, tid []byte
		if err := rows.Scan(&wait, &lane, &id, &topic, &message, &key, &payload, &metadata, &created,
			&attempts, &tried, &crashed, &unanswered, &held, &age, &late, &nth, &missing, &tid); err != nil {
			return nil, 0, err
		}
		if !id.Valid {
			if next < 0 {
				next = max(0, micros(wait))
			}
			continue
		}
		if held.Bool {
			barred = nth
		}
		if barred == nth {
			continue
		}
		due = append(due, Row{
			Row: outboxstore.Row{
				Ref: outboxstore.Ref{
					Lane: int(lane.Int64), ID: id.Int64, MessageID: message.String,
					CreatedAt: time.UnixMicro(created.Int64).UTC(), CTID: outboxstore.CTIDOf(tid),
				},
				Topic: topic.String, Key: key.String, Payload: payload, Metadata: metadata, Missing: int(missing.Int64),
			},
			Attempts: int(attempts.Int64), Tried: tried.Bool, Crashed: crashed.Bool, Unanswered: unanswered.Bool, Age: micros(age.Int64), Late: micros(late.Int64),
		})
	}
	return due, next, rows.Err()
}
