package relay

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/outbox"
)

// parkedBytes is how much payload and metadata due returns of a key, but at least one
// row.
const parkedBytes = 1 << 20

// rowBytes is the share of a row in a look's bytes, besides payload and metadata.
const rowBytes = 256

// bytesOf returns the share of rows in a look's bytes.
func bytesOf(rows []parkedRow) (bytes int) {
	for _, r := range rows {
		bytes += rowBytes + len(r.Payload) + len(r.Metadata)
	}
	return bytes
}

func newParkingStore(box *outbox.Outbox) parkingStore {
	if box.Config().Database.Dialect == oncemill.SQLite {
		return newSQLiteParking(box)
	}
	return newPostgresParking(box)
}

// fingerprint groups similar failures.
func (f failure) fingerprint() string {
	return dlqstore.Fingerprint("relay", f.class, f.text, f.MessageID)
}

// clean makes an error's text acceptable to every database.
func clean(s string) string {
	const limit = 8 << 10
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "�"), "\x00", "�")
}

func reportMissed(ctx context.Context, box *outbox.Outbox, rows int, broken error) {
	box.Config().Logger.ErrorContext(ctx, "delivered messages are removed without being kept in the history", "rows", rows, "error", broken)
}

// each calls take for rows until it wants no more.
func each(rows *sql.Rows, take func(row *sql.Rows) (more bool, err error)) error {
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		if more, err := take(rows); err != nil || !more {
			return err
		}
	}
	return rows.Err()
}

// scanKeys reads (lane, key) pairs.
func scanKeys(rows *sql.Rows, err error) ([]parkedKey, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var keys []parkedKey
	for rows.Next() {
		var k parkedKey
		if err := rows.Scan(&k.lane, &k.key); err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, rows.Err()
}

// scanKeyStates reads keys, with whether they have rows in parked.
func scanKeyStates(rows *sql.Rows, err error) (parked, unparked []parkedKey, _ error) {
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var k parkedKey
		var there bool
		if err := rows.Scan(&k.lane, &k.key, &there); err != nil {
			return nil, nil, err
		}
		if there {
			parked = append(parked, k)
		} else {
			unparked = append(unparked, k)
		}
	}
	return parked, unparked, rows.Err()
}

// scanSettled reads the keys of deleted rows, with their number and whether the first
// row of the key was among them. It returns the keys of those.
func scanSettled(rows *sql.Rows, err error) (keys []parkedKey, removed int, _ error) {
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var k parkedKey
		var n int
		var first bool
		if err := rows.Scan(&k.lane, &k.key, &n, &first); err != nil {
			return nil, 0, err
		}
		removed += n
		if k.key != "" && first {
			keys = append(keys, k)
		}
	}
	return keys, removed, rows.Err()
}

func scanCommands(rows *sql.Rows, err error) ([]command, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	var found []command
	for rows.Next() {
		var c command
		if err := rows.Scan(&c.letter, &c.lane, &c.key); err != nil {
			return nil, err
		}
		found = append(found, c)
	}
	return found, rows.Err()
}

// scanFound reads the one row that find returns.
func scanFound(row *sql.Row) (r parkedRow, parked, found bool, err error) {
	var created, age int64
	err = row.Scan(&r.Lane, &r.ID, &r.Topic, &r.MessageID, &r.Key, &created,
		&r.attempts, &r.tried, &r.crashed, &r.unanswered, &age, &parked)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return parkedRow{}, false, false, nil
	case err != nil:
		return parkedRow{}, false, false, err
	}
	r.CreatedAt, r.age = time.UnixMicro(created).UTC(), micros(age)
	return r, parked, true, nil
}

// scanPiece reads a piece of a payload.
func scanPiece(row *sql.Row) (piece []byte, err error) {
	if err = row.Scan(&piece); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read a piece of a parked message: %w", err)
	}
	return piece, nil
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// parkedTopic is a topic of a lane that has heads in parked.
type parkedTopic struct {
	lane  int
	topic string
	wait  time.Duration // until its first head is due
	place int           // among the topics of its lane that were looked at, from 1
}

func scanTopics(rows *sql.Rows, err error) (topics []parkedTopic, _ error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	for rows.Next() {
		var t parkedTopic
		var wait int64
		if err := rows.Scan(&t.lane, &t.topic, &wait, &t.place); err != nil {
			return nil, err
		}
		t.wait = micros(wait)
		topics = append(topics, t)
	}
	return topics, rows.Err()
}

// mostTopicsDue bounds the topics of lanes that one look brings rows of.
const mostTopicsDue = 512

// choose returns the topics with due rows, longest waiting first, and the rest of a
// look's result: where to continue if a lane has more topics than were looked at, and
// when the first of the others is due.
func (r dueRequest) choose(topics []parkedTopic) (due []parkedTopic, found looked) {
	found.next = -1
	for _, t := range topics {
		if t.place == r.most && (found.more == "" || t.topic < found.more) {
			found.more = t.topic
		}
		switch {
		case slices.Contains(r.topics, t.topic):
		case t.wait > 0:
			found.sooner(t.wait)
		default:
			due = append(due, t)
		}
	}
	slices.SortFunc(due, func(a, b parkedTopic) int {
		return cmp.Or(cmp.Compare(a.wait, b.wait), cmp.Compare(a.topic, b.topic), cmp.Compare(a.lane, b.lane))
	})
	if len(due) > mostTopicsDue {
		due = due[:mostTopicsDue]
		found.sooner(0)
	}
	return due, found
}

// sooner records that something is due after wait; negative: nothing is.
func (l *looked) sooner(wait time.Duration) {
	if wait >= 0 && (l.next < 0 || wait < l.next) {
		l.next = wait
	}
}

// unique drops duplicate keys: a key may have a head and a held row behind it.
func unique(keys []parkedKey) []parkedKey {
	seen := make(map[parkedKey]bool, len(keys))
	return slices.DeleteFunc(keys, func(k parkedKey) bool {
		before := seen[k]
		seen[k] = true
		return before
	})
}

// scanDue reads heads in the order of their times, each with the rows of its key. A
// head that is not due, or one too many, has no rows and shows when to ask again.
// Nothing may be published behind a held row.
func scanDue(rows *sql.Rows, err error) (due []parkedRow, next time.Duration, _ error) {
	if err != nil {
		return nil, 0, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	next = -1
	barred := int64(0) // the place of a head behind which a row is held
	for rows.Next() {
		var wait, place int64
		var missing sql.NullInt64
		var lane, id, created, attempts, age sql.NullInt64
		var tried, crashed, unanswered, held sql.NullBool
		var topic, message, key sql.NullString
		var payload, metadata, tid []byte
		if err := rows.Scan(&wait, &lane, &id, &topic, &message, &key, &payload, &metadata, &created,
			&attempts, &tried, &crashed, &unanswered, &held, &age, &place, &missing, &tid); err != nil {
			return nil, 0, err
		}
		if !id.Valid {
			if next < 0 {
				next = max(0, micros(wait))
			}
			continue
		}
		if held.Bool {
			barred = place
		}
		if barred == place {
			continue
		}
		due = append(due, parkedRow{
			Row: outboxstore.Row{
				Ref: outboxstore.Ref{
					Lane: int(lane.Int64), ID: id.Int64, MessageID: message.String,
					CreatedAt: time.UnixMicro(created.Int64).UTC(), CTID: outboxstore.CTIDOf(tid),
				},
				Topic: topic.String, Key: key.String, Payload: payload, Metadata: metadata, Missing: int(missing.Int64),
			},
			attempts: int(attempts.Int64), tried: tried.Bool, crashed: crashed.Bool, unanswered: unanswered.Bool, age: micros(age.Int64),
		})
	}
	return due, next, rows.Err()
}
