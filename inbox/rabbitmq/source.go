package rabbitmq

// Source names what Subscribe consumes from: the broker, without its password, and the queue
// of the topic. Consumers with the same source share its messages. It is "" if the broker
// chooses the name of the queue.
func (s *Subscriber) Source(topic string) string {
	queue := s.settings.topology.Queue.GenerateName(topic)
	if queue == "" {
		return ""
	}
	return s.settings.conn.Shown() + " queue " + queue
}
