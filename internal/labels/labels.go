// Package labels bounds the values of the attributes of metrics.
package labels

import "sync"

// Most is how many values a Set passes on. Each makes at least one time series.
const Most = 200

// Other stands for all values beyond.
const Other = "_other"

// Set passes on the first [Most] values that it sees, and Other for any further one. The
// zero value is ready. It is safe for concurrent use.
type Set struct {
	mu   sync.RWMutex
	seen map[string]struct{}
}

// Of returns value, or Other.
func (s *Set) Of(value string) string {
	s.mu.RLock()
	_, known := s.seen[value]
	full := len(s.seen) >= Most
	s.mu.RUnlock()
	switch {
	case known:
		return value
	case full:
		return Other
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.seen[value]; !known && len(s.seen) >= Most {
		return Other
	}
	if s.seen == nil {
		s.seen = map[string]struct{}{}
	}
	s.seen[value] = struct{}{}
	return value
}
