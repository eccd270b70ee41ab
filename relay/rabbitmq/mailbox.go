package rabbitmq

import "sync"

// mailbox is a queue between goroutines whose put never waits. Its owner waits on wake,
// which several mailboxes may share.
type mailbox[T any] struct {
	wake chan struct{} // capacity 1: holds a token while there may be mail

	mu     sync.Mutex
	mail   []T
	closed bool
}

func newMailbox[T any](wake chan struct{}) *mailbox[T] {
	return &mailbox[T]{wake: wake}
}

// put reports whether the mailbox was open.
func (m *mailbox[T]) put(one T) bool {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return false
	}
	m.mail = append(m.mail, one)
	m.mu.Unlock()
	poke(m.wake)
	return true
}

// take empties the mailbox into emptied, which is reused for later mail.
func (m *mailbox[T]) take(emptied []T) []T {
	clear(emptied)
	m.mu.Lock()
	defer m.mu.Unlock()
	mail := m.mail
	m.mail = emptied[:0]
	return mail
}

// close makes every later put fail and returns what was left.
func (m *mailbox[T]) close() []T {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	mail := m.mail
	m.mail = nil
	return mail
}

// poke leaves a token in wake unless one is there.
func poke(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}
