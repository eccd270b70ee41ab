package outboxqueue

import "time"

// KnowRefused sets how many scheduled messages that cannot be moved are known one by
// one. For tests.
func (q *Queue) KnowRefused(most int) { q.scheduler.state.most = most }

// PassOver sets how many keys a look passes over. For tests.
func (q *Queue) PassOver(keys int) { q.scheduler.state.mostWaiting = keys }

// TryRefusedNow has what could not be moved be tried again. For tests.
func (q *Queue) TryRefusedNow() {
	s := q.scheduler.state
	s.mu.Lock()
	defer s.mu.Unlock()
	s.largeAt, s.roundAt = time.Time{}, time.Time{}
	for i := range s.postponed {
		s.postponed[i].until = time.Time{}
	}
}
