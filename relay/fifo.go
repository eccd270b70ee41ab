package relay

import "slices"

// fifo is a queue of entries. An entry whose state has changed since it was pushed is
// skipped when its turn comes.
type fifo struct {
	items []*entry
	first int
}

func (q *fifo) len() int { return len(q.items) - q.first }

func (q *fifo) push(m *entry) {
	if q.first > len(q.items)/2 { // more popped than left: move down, amortized
		n := copy(q.items, q.items[q.first:])
		clear(q.items[n:])
		q.items, q.first = q.items[:n], 0
	}
	q.items = append(q.items, m)
}

// pushFirst puts m at the front.
func (q *fifo) pushFirst(m *entry) {
	if q.first == 0 {
		q.items = slices.Insert(q.items, 0, m)
		return
	}
	q.first--
	q.items[q.first] = m
}

// next returns the first entry that is still ready, which drop then removes; nil
// if there is none.
func (q *fifo) next() *entry {
	for ; q.len() > 0; q.drop() {
		if m := q.items[q.first]; m.state == stateReady {
			return m
		}
	}
	return nil
}

func (q *fifo) drop() {
	q.items[q.first] = nil
	q.first++
}

func (q *fifo) pop(most int) []*entry {
	n := min(most, q.len())
	popped := slices.Clone(q.items[q.first : q.first+n])
	clear(q.items[q.first : q.first+n])
	q.first += n
	return popped
}
