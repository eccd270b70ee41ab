package rabbitmq

import "github.com/oncemill/oncemill/relay"

// suspects is what a lane knows of messages that may make the broker close the
// channel. The broker does not say which message it complains of, and everything
// in flight goes down with it, perhaps for ever if they always went together. So
// all that was in flight is suspected, and from then on a suspect is published
// only when nothing else is in flight: the next time, the guilty one is alone.
//
// If the complaint is of the exchange (missing, forbidden) its topic is
// suspected too, so that one message of it at a time finds out.
type suspects struct {
	limit  int
	ids    map[int64]struct{}
	topics map[string]struct{}
}

func newSuspects(window int) suspects {
	return suspects{
		limit:  4 * window,
		ids:    make(map[int64]struct{}),
		topics: make(map[string]struct{}),
	}
}

func (s *suspects) has(m *relay.Message) bool {
	if len(s.ids) == 0 && len(s.topics) == 0 {
		return false
	}
	_, id := s.ids[m.ID]
	_, topic := s.topics[m.Topic]
	return id || topic
}

// add suspects the messages of entries. Those of long ago, which the relay never
// sent again, are forgotten when there are too many.
func (s *suspects) add(entries []*entry) {
	if len(s.ids)+len(entries) > s.limit {
		clear(s.ids)
	}
	for _, e := range entries {
		s.ids[e.message.ID] = struct{}{}
	}
}

func (s *suspects) addTopic(topic string) {
	if len(s.topics) >= maxRoutes {
		clear(s.topics)
	}
	s.topics[topic] = struct{}{}
}

// clear is called when the broker has taken m alone.
func (s *suspects) clear(m *relay.Message) {
	delete(s.ids, m.ID)
	delete(s.topics, m.Topic)
}
