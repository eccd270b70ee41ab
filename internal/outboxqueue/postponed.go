package outboxqueue

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

func (s *moveState) find(seq int64) int {
	return slices.IndexFunc(s.postponed, func(a postponed) bool { return a.Seq == seq })
}

// postpone postpones a message, and returns for how long. If there is no room for it, it
// is left to rounds, with everything before it.
func (s *moveState) postpone(r outboxstore.Scheduled, bytes int64, limit time.Duration, late, inRound bool, now time.Time) (wait time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.find(r.Seq)
	switch {
	case i >= 0:
	case len(s.postponed) < s.most:
		i = len(s.postponed)
		s.postponed = append(s.postponed, postponed{Scheduled: r, bytes: bytes})
	case inRound:
		s.missed = true
		if late { // may need more time than a round gives
			s.largeLimit = min(2*limit, mostLargeLimit)
		}
		return s.roundWait
	default:
		s.leaveTo(r.Position, now)
		return s.roundAt.Sub(now)
	}
	a := &s.postponed[i]
	if late {
		a.limit, s.largeAt = min(2*limit, mostLargeLimit), now.Add(shortestPostponed)
	}
	if a.wait = max(2*a.wait, shortestPostponed); late && limit < mostLargeLimit {
		a.wait = shortestPostponed
	}
	a.wait = min(a.wait, longestPostponed)
	a.until = now.Add(a.wait)
	return a.wait
}

// forget drops a message from the postponed ones. It is gone, or it waits for another one
// of its key, as any message does.
func (s *moveState) forget(seq int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.postponed = slices.DeleteFunc(s.postponed, func(a postponed) bool { return a.Seq == seq })
}

// retry returns the postponed message that is to be retried first.
func (s *moveState) retry(now time.Time) (postponed, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first *postponed
	for i, a := range s.postponed {
		if !now.Before(a.until) && (a.limit == 0 || !now.Before(s.largeAt)) && (first == nil || a.until.Before(first.until)) {
			first = &s.postponed[i]
		}
	}
	if first == nil {
		return postponed{}, false
	}
	return *first, true
}

// retryIn returns when a message is to be retried, or when a round continues.
func (s *moveState) retryIn(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := longestPostponed
	for _, a := range s.postponed {
		wait := a.until.Sub(now)
		if a.limit > 0 {
			wait = max(wait, s.largeAt.Sub(now))
		}
		in = min(in, wait)
	}
	if s.behind != outboxstore.Beginning {
		in = min(in, s.roundAt.Sub(now))
	}
	return in
}

// skip postpones what could not be looked at: a postponed message, or large
// ones.
func (s *moveState) skip(seq int64, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.find(seq); i >= 0 {
		s.postponed[i].until = now.Add(shortestPostponed)
	} else {
		s.largeAt = now.Add(shortestPostponed)
	}
}

// leave leaves everything up to a position to rounds. It may be retried soon: the
// transactions that it waits for may have ended.
func (s *moveState) leave(upTo outboxstore.Position, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveTo(upTo, now)
}

// leaveTo is called with mu held.
func (s *moveState) leaveTo(upTo outboxstore.Position, now time.Time) {
	if s.behind == outboxstore.Beginning {
		s.roundWait, s.roundAt = shortestPostponed, now.Add(shortestPostponed)
	}
	s.behind = upTo
}

// inRound returns the positions between which a round tries the next message.
func (s *moveState) inRound(now time.Time) (after, upTo outboxstore.Position, due bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.round, s.behind, s.behind != outboxstore.Beginning && !now.Before(s.roundAt)
}

// wentTo records that everything up to a position has been tried in this round.
func (s *moveState) wentTo(last outboxstore.Position) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.round = last
}

// roundLater makes the round continue after a while.
func (s *moveState) roundLater(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roundAt = now.Add(shortestPostponed)
}

// roundOver records that a round has found nothing more. It was the last one if every
// message that could not be moved was postponed.
func (s *moveState) roundOver(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.missed {
		s.behind = outboxstore.Beginning
	}
	s.roundWait = min(2*s.roundWait, longestPostponed)
	s.round, s.missed, s.roundAt = outboxstore.Beginning, false, now.Add(s.roundWait)
}

// passed returns what a look passes over: the messages that are postponed, all of their
// keys, and everything that is left to rounds.
func (s *moveState) passed() outboxstore.Passed {
	s.mu.Lock()
	defer s.mu.Unlock()
	over := outboxstore.Passed{UpTo: s.behind}
	for _, p := range s.postponed {
		over.Seqs = append(over.Seqs, p.Seq)
		if p.Key != "" {
			over.Keys = append(over.Keys, p.Key)
		}
	}
	return over
}
