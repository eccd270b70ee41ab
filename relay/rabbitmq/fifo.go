package rabbitmq

// fifo is a queue in a slice that is reused.
type fifo[T any] struct {
	items []T
	first int
}

func (q *fifo[T]) push(one T) {
	if len(q.items) == cap(q.items) && q.first > len(q.items)/2 {
		n := copy(q.items, q.items[q.first:])
		clear(q.items[n:])
		q.items, q.first = q.items[:n], 0
	}
	q.items = append(q.items, one)
}

// all returns the queued items, oldest first; it is valid until the next push or drop.
func (q *fifo[T]) all() []T { return q.items[q.first:] }

func (q *fifo[T]) len() int { return len(q.items) - q.first }

// drop removes the n oldest.
func (q *fifo[T]) drop(n int) {
	clear(q.items[q.first : q.first+n])
	q.first += n
	if q.first == len(q.items) {
		q.items, q.first = q.items[:0], 0
	}
}

// cut removes all but the n oldest.
func (q *fifo[T]) cut(n int) {
	clear(q.items[q.first+n:])
	q.items = q.items[:q.first+n]
	q.drop(0)
}

// remove removes the item at an index of all.
func (q *fifo[T]) remove(i int) {
	copy(q.items[q.first+i:], q.items[q.first+i+1:])
	q.cut(q.len() - 1)
}
