package rabbitmq

import "github.com/oncemill/oncemill/relay"

// isolation holds a lane's messages that may make the broker close the channel. The broker
// does not report which message it complains about, and everything in flight is lost with
// the channel, perhaps forever if the messages were always sent together. So everything in
// flight is isolated. From then on such a message is published only when nothing else is
// in flight: the next time, the message at fault is alone.
//
// If the complaint is about the exchange (missing, forbidden), its topic is isolated too,
// so that only one message of it at a time finds out.
type isolation struct {
	limit  int
	ids    map[int64]struct{}
	topics map[string]struct{}
}

func newIsolation(window int) isolation {
	return isolation{
		limit:  4 * window,
		ids:    make(map[int64]struct{}),
		topics: make(map[string]struct{}),
	}
}

func (s *isolation) has(m *relay.Message) bool {
	if len(s.ids) == 0 && len(s.topics) == 0 {
		return false
	}
	_, id := s.ids[m.ID]
	_, topic := s.topics[m.Topic]
	return id || topic
}

// add isolates the messages of entries. When there are too many, it forgets the earlier
// ones: most likely the relay never sent them again.
func (s *isolation) add(entries []*entry) {
	if len(s.ids)+len(entries) > s.limit {
		clear(s.ids)
	}
	for _, e := range entries {
		s.ids[e.message.ID] = struct{}{}
	}
}

func (s *isolation) addTopic(topic string) {
	if len(s.topics) >= maxRoutes {
		clear(s.topics)
	}
	s.topics[topic] = struct{}{}
}

// clear is called when the broker has accepted m alone.
func (s *isolation) clear(m *relay.Message) {
	delete(s.ids, m.ID)
	delete(s.topics, m.Topic)
}
