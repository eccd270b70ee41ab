package rabbitmq

import (
	"slices"

	"github.com/oncemill/oncemill/relay"
)

// late contains a lane's copies whose messages were reported as unavailable and whose
// confirms are still awaited, on any channel. Its size is bounded by what may be in
// flight.
type late struct {
	copies map[int64][]*entry // by the id of the row

	// repeated removes the message from the pending ones, if it was passed to the sink
	// again. It returns the function to report its outcome to, or nil.
	repeated func(*relay.Message) func(*relay.Message, error)
}

func (l *late) add(e *entry) {
	if l.copies == nil {
		l.copies = make(map[int64][]*entry)
	}
	l.copies[e.message.ID] = append(l.copies[e.message.ID], e)
}

// remove undoes add.
func (l *late) remove(e *entry) {
	e.late = nil
	kept := slices.DeleteFunc(l.copies[e.message.ID], func(other *entry) bool { return other == e })
	if len(kept) == 0 {
		delete(l.copies, e.message.ID)
	} else {
		l.copies[e.message.ID] = kept
	}
}

// settle is called when m is confirmed or refused: nothing more is reported about it.
func (l *late) settle(m *relay.Message) {
	if len(l.copies) == 0 {
		return
	}
	for _, e := range slices.Clone(l.copies[m.ID]) {
		if e.message == m {
			l.remove(e)
		}
	}
}

// confirm reports the message of a copy that was confirmed after all.
func (l *late) confirm(e *entry) {
	m, done := e.message, e.late
	l.settle(m)
	if again := l.repeated(m); again != nil {
		done = again
	}
	done(m, nil)
}

// on returns a copy of m in flight on a channel, nil if there is none.
func (l *late) on(c *channel, m *relay.Message) *entry {
	if c == nil || len(l.copies) == 0 {
		return nil
	}
	for _, e := range l.copies[m.ID] {
		if e.channel == c && sameRow(e.message, m) {
			return e
		}
	}
	return nil
}

// sameRow reports whether two messages are the same row, which may have been read twice.
// The id alone is not enough: after a failover ids may be assigned again.
func sameRow(a, b *relay.Message) bool {
	return a == b || a.Lane == b.Lane && a.ID == b.ID && a.MessageID == b.MessageID && a.Topic == b.Topic && a.CreatedAt.Equal(b.CreatedAt)
}
