package outboxstore

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
)

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

// Due is the first scheduled message.
type Due struct {
	In    time.Duration // until it is due
	Bytes int64         // of payload and metadata
}

const (
	moveRows  = 2000
	moveBytes = 8 << 20

	moveIdle = time.Second // something may be scheduled for an earlier time meanwhile
)

// ScheduledRow is a message for a later time.
type ScheduledRow struct {
	Row
	Micros   int64 // since 1970, or from now on if Relative
	Relative bool
}

func scheduleArgs(rows []ScheduledRow) []any {
	args := make([]any, 0, len(rows)*scheduleColumns)
	for _, r := range rows {
		relative := 0
		if r.Relative {
			relative = 1
		}
		args = append(args, r.Lane, r.Topic, r.MessageID, r.Key, r.Payload, r.Metadata, relative, r.Micros)
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

func scheduleRows(ctx context.Context, tx oncemill.ExecTx, rows []ScheduledRow, most int, head string, parts [scheduleColumns + 1]string) error {
	for chunk := range chunks(rows, most, func(r *ScheduledRow) *Row { return &r.Row }) {
		if _, err := tx.ExecContext(ctx, scheduleText(head, parts, len(chunk)), scheduleArgs(chunk)...); err != nil {
			return err
		}
	}
	return nil
}
