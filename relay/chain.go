package relay

// chain holds the known, unconfirmed messages of one key, oldest first. Unless the lane
// is one pipeline, only the head may be published.
//
// While the key is retrying, the chain holds only rows of the table parked; rows of the
// outbox are followers.
type chain struct {
	head, tail *entry
	length     int
	retrying   bool    // the key has retrying messages, or is about to
	failing    *entry  // nothing is published before its failure is recorded
	commands   []int64 // dead letters with commands; nothing is published before these are carried out
	sweeping   bool    // nothing is published before it is swept
}

// stopped reports whether nothing of the key may be published until a task is done.
func (c *chain) stopped() bool { return c.failing != nil || len(c.commands) > 0 || c.sweeping }

// insert puts m into its position by id, but not before the head, which may be in
// flight. A producer that does not serialize on its key may commit an earlier id late.
// It has no guarantee, but gets the best possible order.
func (c *chain) insert(m *entry) {
	c.length++
	switch {
	case c.head == nil:
		c.head, c.tail = m, m
	case c.tail.ID < m.ID:
		c.tail.next, c.tail = m, m
	default:
		before := c.head
		for before.next != nil && before.next.ID < m.ID {
			before = before.next
		}
		m.next, before.next = before.next, m
		if m.next == nil {
			c.tail = m
		}
	}
}

// remove removes m, which is the head unless the lane is one pipeline.
func (c *chain) remove(m *entry) {
	var before *entry
	for at := c.head; at != m; at = at.next {
		if at == nil {
			return
		}
		before = at
	}
	if before == nil {
		c.head = m.next
	} else {
		before.next = m.next
	}
	if c.tail == m {
		c.tail = before
	}
	m.next = nil
	c.length--
}
