// Package repeats keeps an outage from filling the log. Of failures that repeat, the first
// is reported, then one at growing intervals with the number of failures, then the end. A
// failure of another kind is reported at once.
package repeats

import (
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	first = 10 * time.Second // between the first report and the second
	most  = 10 * time.Minute // between two later ones
	calm  = time.Minute      // without a failure; after that the next one is news
)

// mostKinds bounds the lines of failures that differ from each other.
const mostKinds = 8

// Series is what fails again and again. The zero value is ready. It is safe for concurrent use.
type Series struct {
	failing atomic.Bool // so that Over costs a look

	mu       sync.Mutex
	failures int
	began    time.Time
	last     time.Time // failure
	reported bool      // since it began
	next     time.Time // report
	pause    time.Duration
	kinds    []uint64 // that were reported, as hashes
}

// Failed counts a failure, and returns the level and further attributes of its line: the
// level at if it is to be reported, debug otherwise. The series lasts until [Series.Over].
//
// A failure of a kind that the series has not reported yet is reported at once; after
// [mostKinds] of them, all wait for the interval. Kinds that differ in digits only, such as
// ports and ids, are one.
//
// What fails and works by turns is reported no more often than what fails all the time. A
// failure at level debug is counted, and delays no later report.
func (s *Series) Failed(at slog.Level, kind string) (level slog.Level, attrs []any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed(time.Now(), at, kind)
}

// Event is Failed for what has no end: a minute without an event ends the series.
func (s *Series) Event(at slog.Level, kind string) (level slog.Level, attrs []any) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.last) > calm {
		s.failures = 0
	}
	return s.failed(now, at, kind)
}

func (s *Series) failed(now time.Time, at slog.Level, kind string) (level slog.Level, attrs []any) {
	if s.failures == 0 {
		s.began = now
		if now.Sub(s.last) > calm {
			s.pause, s.next, s.kinds = 0, time.Time{}, s.kinds[:0]
		}
	}
	s.failures, s.last = s.failures+1, now
	s.failing.Store(true)
	if at <= slog.LevelDebug {
		return at, nil
	}
	if fresh := s.fresh(kind); now.Before(s.next) {
		if !fresh {
			return slog.LevelDebug, nil
		}
	} else {
		if s.pause = min(3*s.pause, most); s.pause == 0 {
			s.pause = first
		}
		s.next = now.Add(s.pause)
	}
	s.reported = true
	if s.failures == 1 {
		return at, nil
	}
	return at, s.attrs(now)
}

// fresh reports whether a kind was not reported yet, and remembers it.
func (s *Series) fresh(kind string) bool {
	if len(s.kinds) >= mostKinds {
		return false
	}
	h := hash(kind)
	if slices.Contains(s.kinds, h) {
		return false
	}
	s.kinds = append(s.kinds, h)
	return true
}

// hash is FNV-1a of the beginning of a text without its digits.
func hash(kind string) uint64 {
	const longest = 1024
	h := uint64(14695981039346656037)
	for i := range min(len(kind), longest) {
		if c := kind[i]; c < '0' || c > '9' {
			h = (h ^ uint64(c)) * 1099511628211
		}
	}
	return h
}

// Calm reports whether nothing has failed for a while, so that the next failure is news.
func (s *Series) Calm() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.failing.Load() && time.Since(s.last) > calm
}

// Failing reports whether a series has begun and is not over.
func (s *Series) Failing() bool { return s.failing.Load() }

// Over ends a series, if there is one. It returns true if the series was reported, so that
// its end is worth a line, with attributes for that.
func (s *Series) Over() (attrs []any, report bool) {
	if !s.failing.Load() {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failures == 0 {
		return nil, false
	}
	attrs, report = s.attrs(time.Now()), s.reported
	s.failures, s.reported = 0, false
	s.failing.Store(false)
	return attrs, report
}

func (s *Series) attrs(now time.Time) []any {
	return []any{"failures", s.failures, "lasted", now.Sub(s.began).Round(time.Millisecond)}
}
