package outboxqueue

import (
	"slices"
	"sync"
	"time"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// moveState decides how many scheduled messages are moved at a time, and which are
// postponed.
type moveState struct {
	mu         sync.Mutex // guards what follows
	halvings   int        // of the batch
	largeLimit time.Duration
	largeAt    time.Time   // when the next large message may be tried
	postponed  []postponed // in the order in which they were postponed
	most       int         // of them

	// Messages up to behind that are not postponed are left to rounds, which try them
	// one by one: too many could not be moved, or more than mostWaiting keys wait among
	// them.
	mostWaiting int
	behind      outboxstore.Position
	round       outboxstore.Position // everything up to it has been tried in this round
	roundAt     time.Time
	roundWait   time.Duration // of the next one
	missed      bool          // a message found no room in this round

	last attempt // the last one tried alone

	loggedAt time.Time // last log entry about a message that could not be moved
	unlogged int       // since then
}

// postponed is a message that could not be moved.
type postponed struct {
	outboxstore.Scheduled
	bytes int64
	limit time.Duration // of the next attempt
	wait  time.Duration
	until time.Time
}

const (
	mostBatchRows  = 2000
	mostBatchBytes = 8 << 20
	mostHalvings   = 11 // one row

	// Every message that cannot be moved is tried again after a while.
	shortestPostponed = 10 * time.Second
	longestPostponed  = 10 * time.Minute

	// mostPostponed bounds how many such messages are tracked, and mostWaiting the keys
	// that a look passes over in addition.
	mostPostponed = 10_000
	mostWaiting   = 10_000

	// A large message gets the time that its size needs on a slow disk, but less than
	// ten seconds: the connection may be dead. It gets more once the server has
	// answered that this was not enough.
	largeBytesPerSecond = 20 << 20
	mostLargeLimit      = time.Minute
)

func newMoveState() *moveState {
	return &moveState{most: mostPostponed, mostWaiting: mostWaiting, behind: outboxstore.Beginning, round: outboxstore.Beginning}
}

// attempt is what is tried alone.
type attempt int

const (
	attemptNone attempt = iota
	attemptPostponed
	attemptRound
	attemptLarge
)

// takeTurn chooses one of the things that may be tried alone. Each waits only until
// there is no other.
func (s *moveState) takeTurn(postponed, round, large bool) attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range attempt(3) {
		one := 1 + (s.last+i)%3
		if one == attemptPostponed && postponed || one == attemptRound && round || one == attemptLarge && large {
			s.last = one
			return one
		}
	}
	return attemptNone
}

// turnAgain repeats a turn that asked for more time: the next call, which has it, gets
// it.
func (s *moveState) turnAgain(what attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = what - 1
}

// batch returns the rows and bytes of a batch.
func (s *moveState) batch() (rows int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(1, mostBatchRows>>s.halvings), mostBatchBytes >> s.halvings
}

// slower halves the batch, and reports whether that is possible.
func (s *moveState) slower() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.halvings == mostHalvings {
		return false
	}
	s.halvings++
	return true
}

// took doubles the batch after one that used only a small part of its time.
func (s *moveState) took(elapsed, limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if elapsed < limit/8 {
		s.halvings = max(0, s.halvings-1)
	}
}

// tryLarge reports whether a large message may be tried. After one that took too long,
// smaller messages have their turn for a while.
func (s *moveState) tryLarge(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !now.Before(s.largeAt)
}

// large returns the time limit of the statement that moves a message of the given size,
// which may have been postponed.
func (s *moveState) large(seq, bytes int64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	needs := max(moveLimits.Statement+time.Duration(bytes)*time.Second/largeBytesPerSecond, s.largeLimit)
	if i := s.find(seq); i >= 0 {
		needs = max(needs, s.postponed[i].limit)
	}
	return min(needs, mostLargeLimit)
}

// movedAlone records that a message was moved.
func (s *moveState) movedAlone(seq, bytes int64, took, limit time.Duration) {
	s.mu.Lock()
	s.largeAt = time.Time{}
	if bytes > mostBatchBytes {
		s.largeLimit = 2 * took
	}
	s.postponed = slices.DeleteFunc(s.postponed, func(a postponed) bool { return a.Seq == seq })
	s.mu.Unlock()
	if bytes <= mostBatchBytes { // large only because the batch was halved
		s.took(took, limit)
	}
}

// logs reports whether to log that a message could not be moved, and how many there
// were since the last log entry: at most one a second.
func (s *moveState) logs(now time.Time) (others int, due bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.loggedAt) < time.Second {
		s.unlogged++
		return 0, false
	}
	others, s.unlogged, s.loggedAt = s.unlogged, 0, now
	return others, true
}
