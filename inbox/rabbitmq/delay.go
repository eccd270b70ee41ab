package rabbitmq

import (
	"cmp"
	"slices"
	"time"
)

// delay holds p, and its lane, until a time.
func (s *subscription) delay(p *delivery, until time.Time) {
	p.msg, p.note, p.reason = nil, nil, nil // each try has its own
	p.due = until
	if wake := p.wake(); len(s.delayed) == 0 || wake.Before(s.firstDue) {
		s.firstDue = wake
	}
	s.delayed[p] = struct{}{}
}

// gatherTime is how long deliveries that yielded wait for others of their key, which are
// due at about the same time.
const gatherTime = 20 * time.Millisecond

// wake returns when there is something to do for p, which is delayed.
func (p *delivery) wake() time.Time {
	if p.queue {
		return p.due.Add(gatherTime)
	}
	return p.due
}

// release makes the deliveries ready whose delay is over, in the order of their arrival.
func (s *subscription) release(now time.Time) {
	var first time.Time
	var due []*delivery
	for p := range s.delayed {
		switch {
		case !p.due.After(now):
			due = append(due, p)
		case first.IsZero() || p.wake().Before(first):
			first = p.wake()
		}
	}
	s.firstDue = first
	slices.SortFunc(due, func(a, b *delivery) int { return cmp.Compare(a.raw.DeliveryTag, b.raw.DeliveryTag) })
	for _, p := range due {
		delete(s.delayed, p)
		if p.queue {
			p.queue = false
			p.read(s.owner)
			s.lineUp(p)
		} else {
			s.ready = append(s.ready, p)
		}
	}
}

func (s *subscription) untilDue() time.Duration {
	if len(s.delayed) == 0 {
		return time.Hour
	}
	return time.Until(s.firstDue)
}
