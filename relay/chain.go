package relay

// chain holds what is known of one key and not confirmed, oldest first. Unless
// the lane is one pipeline, only the head may go out.
//
// While the key is parked, the chain holds rows of parked alone; rows of the
// outbox are followers.
type chain struct {
	head, tail *entry
	length     int
	parked     bool    // the key has rows in parked, or is about to
	failing    *entry  // nothing goes out before its failure is written down
	letters    []int64 // commands on these; nothing goes out before they are carried out
	sweeping   bool    // nothing goes out before it is swept into parked
}

// stopped reports that nothing of the key goes out until a chore is done.
func (c *chain) stopped() bool { return c.failing != nil || len(c.letters) > 0 || c.sweeping }

// insert puts m into its place by id, but not before the head: that may be in
// flight. A producer that does not serialise on its key may commit an earlier id
// late. It has no promise, but gets the best order there is.
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

// remove takes m, which is the head unless the lane is one pipeline, out.
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
