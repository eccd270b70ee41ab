package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
)

// CancelScheduled removes the scheduled messages with an id that are not yet due, in
// the caller's transaction, and reports whether there were any. False means that there
// is nothing to cancel: the message is in the outbox or delivered, or was never
// scheduled.
//
// While tx is open, due messages with this id, and of the same key, wait for it. The
// result is final when tx commits: end it soon.
func (o *Outbox) CancelScheduled(ctx context.Context, tx oncemill.Tx, messageID string) (bool, error) {
	n, err := o.store.cancel(ctx, tx, messageID)
	if err != nil {
		return false, fmt.Errorf("outbox: cancel scheduled: %w", err)
	}
	return n > 0, nil
}

// Moved is the result of MoveDue.
type Moved struct {
	Rows int // messages moved into the outbox

	// Next is when to call again at the latest: when the next message is due, or when a
	// lock that blocks a due message may have been released.
	Next time.Duration

	// Limit is how much time to give the next call. It is set if a message is due that
	// is too large for the time of this call; 0: as much as usual. That message stays
	// until a call has so much time. Others pass it, except those of its key.
	Limit time.Duration

	// Failed reports that a message, or a batch, could not be moved. Others, or a
	// smaller batch, may be moved at once.
	Failed bool
}

// due is the first scheduled message.
type due struct {
	in    time.Duration // until it is due
	bytes int64         // of payload and metadata
}

const (
	moveRows  = 2000
	moveBytes = 8 << 20
	moveIdle  = time.Second // something may be scheduled for an earlier time meanwhile
	moveHeld  = 50 * time.Millisecond
)

// MoveDue moves a batch of due scheduled messages into the outbox, by due time, then
// publish order, and wakes the relays of this process. If nothing is due, it is one
// statement that reads the first message. guard is as in [Queue.Maintain]. Only one
// process at a time may call it, or the order of keys is lost.
//
// A message that an open transaction cancels, and the later ones of its key, are passed
// over until that transaction has ended.
func (q *Queue) MoveDue(ctx context.Context, guard func(ctx context.Context, tx *sql.Tx) (bool, error)) (Moved, error) {
	head, err := q.box.store.nextDue(ctx)
	if err != nil {
		return Moved{Next: moveIdle}, fmt.Errorf("look for what is due: %w", err)
	}
	if head.in > 0 {
		return Moved{Next: min(head.in, moveIdle)}, nil
	}
	moved, err := q.box.store.moveDue(ctx, guard, head)
	switch {
	case err != nil:
		moved.Next = moveIdle
		return moved, fmt.Errorf("move what is due: %w", err)
	case moved.Rows > 0:
		q.box.Wake()
	default:
		moved.Next = moveHeld
	}
	return moved, nil
}

type scheduledRow struct {
	Row
	delay
}

func scheduleArgs(rows []scheduledRow) []any {
	args := make([]any, 0, len(rows)*scheduleColumns)
	for _, r := range rows {
		relative := 0
		if r.relative {
			relative = 1
		}
		args = append(args, r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata, relative, r.micros)
	}
	return args
}

const scheduleColumns = 8

// scheduleText returns head with n rows of values. parts are the texts around the
// parameters of a row.
func scheduleText(head string, parts [scheduleColumns + 1]string, n int) string {
	var b strings.Builder
	b.WriteString(head)
	for i := range n * scheduleColumns {
		column := i % scheduleColumns
		if column == 0 && i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(parts[column])
		b.WriteByte('$')
		b.WriteString(strconv.Itoa(i + 1))
		if column == scheduleColumns-1 {
			b.WriteString(parts[scheduleColumns])
		}
	}
	return b.String()
}

func scheduleRows(ctx context.Context, tx oncemill.Tx, rows []scheduledRow, most int, head string, parts [scheduleColumns + 1]string) error {
	for chunk := range chunks(rows, most, func(r *scheduledRow) *Row { return &r.Row }) {
		if _, err := tx.ExecContext(ctx, scheduleText(head, parts, len(chunk)), scheduleArgs(chunk)...); err != nil {
			return err
		}
	}
	return nil
}
