package outbox

import "sync"

// signal wakes any number of listeners. A raise while a listener is awake, or has not
// yet handled the last one, is remembered once.
type signal struct {
	mu        sync.Mutex // guards listeners
	listeners map[chan struct{}]struct{}
}

func (s *signal) raise() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.listeners {
		select {
		case l <- struct{}{}:
		default:
		}
	}
}

func (s *signal) listen() (<-chan struct{}, func()) {
	l := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listeners == nil {
		s.listeners = map[chan struct{}]struct{}{}
	}
	s.listeners[l] = struct{}{}
	return l, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.listeners, l)
	}
}
