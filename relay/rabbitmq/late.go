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
	// again. It returns that and the function to report its outcome to, or nil.
	repeated func(*relay.Message) (*relay.Message, func(*relay.Message, error))
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
		if e.message.SameRow(m) {
			l.remove(e)
		}
	}
}

// confirm reports the message of a copy that was confirmed after all.
func (l *late) confirm(e *entry) {
	m, done := e.message, e.late
	l.settle(m)
	if again, report := l.repeated(m); again != nil {
		m, done = again, report
	}
	done(m, nil)
}

// on returns a copy of m in flight on a channel, nil if there is none.
func (l *late) on(c *channel, m *relay.Message) *entry {
	if c == nil || len(l.copies) == 0 {
		return nil
	}
	for _, e := range l.copies[m.ID] {
		if e.channel == c && e.message.SameRow(m) {
			return e
		}
	}
	return nil
}
