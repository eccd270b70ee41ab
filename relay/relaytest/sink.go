package relaytest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/oncemill/oncemill/relay"
)

// Sink is a [relay.Sink] in memory. It confirms and keeps every message, except those that
// it was told to fail. The zero value is ready to use. All methods are safe for concurrent
// use, also while a relay runs.
type Sink struct {
	mu        sync.Mutex // guards all below
	confirmed []relay.Message
	attempts  map[string]int
	topics    map[string]error // outcomes that were asked for
	messages  map[string]error
	changed   chan struct{} // closed at the next confirmation, if somebody waits
}

var _ relay.Sink = (*Sink)(nil)

// Run blocks until ctx ends.
func (s *Sink) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Publish gives every message its outcome before it returns.
func (s *Sink) Publish(_ context.Context, msgs []*relay.Message, done func(*relay.Message, error)) {
	for _, m := range msgs {
		done(m, s.take(m))
	}
}

func (s *Sink) take(m *relay.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.attempts == nil {
		s.attempts = map[string]int{}
	}
	s.attempts[m.MessageID]++
	if err := s.messages[m.MessageID]; err != nil {
		return err
	}
	if err := s.topics[m.Topic]; err != nil {
		return err
	}
	// A copy, because the relay continues to use m.
	s.confirmed = append(s.confirmed, relay.Message{
		Lane: m.Lane, ID: m.ID, Topic: m.Topic, MessageID: m.MessageID, Key: m.Key,
		Payload: slices.Clone(m.Payload), Metadata: maps.Clone(m.Metadata), CreatedAt: m.CreatedAt,
	})
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	return nil
}

// Fail makes err the outcome of every message of topic, until it is called again with
// another error or with nil. An error made by [relay.Refused] means that the message is at
// fault; one made by [relay.Unavailable] means an outage. For any other error, the relay
// finds out which it is.
func (s *Sink) Fail(topic string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.topics == nil {
		s.topics = map[string]error{}
	}
	s.topics[topic] = err
}

// FailMessage is like Fail, for the message with this id, whatever its topic.
func (s *Sink) FailMessage(id string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.messages == nil {
		s.messages = map[string]error{}
	}
	s.messages[id] = err
}

// Messages returns the confirmed messages, in order of confirmation. A message that was
// delivered twice appears twice.
func (s *Sink) Messages() []relay.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.confirmed)
}

// Attempts returns how often the message with this id was passed to the sink, whatever the
// outcome.
func (s *Sink) Attempts(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attempts[id]
}

// Wait waits until at least n messages are confirmed, and returns all confirmed messages.
// It fails if ctx ends before.
func (s *Sink) Wait(ctx context.Context, n int) ([]relay.Message, error) {
	for {
		s.mu.Lock()
		confirmed := slices.Clone(s.confirmed)
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		if len(confirmed) >= n {
			return confirmed, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return confirmed, fmt.Errorf("relaytest: %d messages of %d: %w", len(confirmed), n, ctx.Err())
		}
	}
}

// Reset removes all messages and attempts. Outcomes set by Fail and FailMessage stay.
func (s *Sink) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed, s.attempts = nil, nil
}
