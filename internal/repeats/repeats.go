// Package repeats keeps an outage from filling the log. Of failures that repeat, the first
// is reported, then one at growing intervals with the number of failures, then the end.
package repeats

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

const (
	first = 10 * time.Second // between the first report and the second
	most  = 10 * time.Minute // between two later ones
	calm  = time.Minute      // without a failure; after that the next one is news
)

// Series is one kind of failure. The zero value is ready. It is safe for concurrent use.
type Series struct {
	failing atomic.Bool // so that Over costs a look

	mu       sync.Mutex
	failures int
	began    time.Time
	last     time.Time // failure
	reported bool      // since it began
	next     time.Time // report
	pause    time.Duration
}

// Failed counts a failure, and returns the level and further attributes of its line: the
// level at if it is to be reported, debug otherwise. The series lasts until [Series.Over].
//
// What fails and works by turns is reported no more often than what fails all the time.
func (s *Series) Failed(at slog.Level) (level slog.Level, attrs []any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed(time.Now(), at)
}

// Event is Failed for what has no end: a minute without an event ends the series.
func (s *Series) Event(at slog.Level) (level slog.Level, attrs []any) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.last) > calm {
		s.failures = 0
	}
	return s.failed(now, at)
}

func (s *Series) failed(now time.Time, at slog.Level) (level slog.Level, attrs []any) {
	if s.failures == 0 {
		s.began = now
		if now.Sub(s.last) > calm {
			s.pause, s.next = 0, time.Time{}
		}
	}
	s.failures, s.last = s.failures+1, now
	s.failing.Store(true)
	if now.Before(s.next) {
		return slog.LevelDebug, nil
	}
	if s.pause = min(3*s.pause, most); s.pause == 0 {
		s.pause = first
	}
	s.next = now.Add(s.pause)
	s.reported = s.reported || at > slog.LevelDebug
	if s.failures == 1 {
		return at, nil
	}
	return at, s.attrs(now)
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
