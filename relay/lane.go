package relay

import (
	"cmp"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/oncemill/oncemill/outbox"
)

// state is where an entry stands on its way from the table to its deletion.
type state uint8

const (
	waiting   state = iota // behind another message of its key
	ready                  // to be published
	inFlight               // handed to the sink, no outcome yet
	failed                 // to be published again, alone
	confirmed              // to be deleted
)

// entry is a row that a lane knows.
type entry struct {
	Message
	lane         *lane
	place        outbox.Place
	metadataSize int
	malformed    error // the row cannot become a message; its outcome without a sink
	state        state
	deadline     time.Time // of the outcome, while in flight
	next         *entry    // of the same key
}

// chain holds the entries of one key that are not confirmed, oldest first. Only
// the head may be ready, in flight or failed.
type chain struct {
	head, tail *entry
	length     int
}

// lane is what a worker remembers of a lane that it holds. It belongs to the
// worker's loop.
//
// An id stays in entries from the read that brought it until its deletion has
// committed, and every read passes over the ids in entries when it starts. Reads
// of a lane do not overlap, so a row that was confirmed is never taken for a new
// one: a read that may have seen it before its deletion started while it was
// known, and a later one starts after the deletion.
type lane struct {
	number  int
	epoch   int64
	trusted time.Time // the lease may be relied on until then

	entries  map[int64]*entry
	chains   map[string]*chain
	ready    fifo
	failed   []*entry // sorted by id
	probing  bool     // the entry in flight is a failed one, alone
	bytes    int      // of payload and metadata in entries
	inFlight int

	reading  bool // a read of this lane is under way
	unbusied bool // a key that the read passes over ceased to be busy
	dry      bool // the last read found less than it asked for

	retry   backoff.BackOff
	retryAt time.Time // after a failure: nothing is published before

	draining bool // finish what is in flight, take nothing new
}

// maxWaiting is how many entries of one key are kept waiting before reads pass
// the key over, and so how far a burst of one key can fill a lane's memory.
const maxWaiting = 32

func newLane(number int, epoch int64, trusted time.Time) *lane {
	return &lane{
		number: number, epoch: epoch, trusted: trusted,
		entries: map[int64]*entry{}, chains: map[string]*chain{},
		retry: newBackOff(),
	}
}

// newBackOff returns exponential backoff with full jitter: each wait is drawn
// from zero to twice an interval that doubles up to a second.
func newBackOff() backoff.BackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(25*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(1),
		backoff.WithMaxInterval(time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}

// add takes the entries that a read brought, in the order of ids, and returns
// how many were new.
func (l *lane) add(entries []*entry) int {
	added := 0
	for _, e := range entries {
		if _, known := l.entries[e.ID]; known {
			continue
		}
		e.lane = l
		l.entries[e.ID] = e
		l.bytes += e.size()
		added++
		if e.Key == "" || l.chainUp(e) {
			e.state = ready
			l.ready.push(e)
		}
	}
	return added
}

func (e *entry) size() int { return len(e.Payload) + e.metadataSize }

// chainUp appends e to its key's chain and reports whether it is the head.
func (l *lane) chainUp(e *entry) bool {
	c := l.chains[e.Key]
	if c == nil {
		c = &chain{}
		l.chains[e.Key] = c
	}
	c.length++
	switch {
	case c.head == nil:
		c.head, c.tail = e, e
		return true
	case c.tail.ID < e.ID:
		c.tail.next, c.tail = e, e
	default:
		// A producer that does not serialise on its key committed an earlier
		// id late. It has no promise, but gets the best order there is.
		before := c.head
		for before.next != nil && before.next.ID < e.ID {
			before = before.next
		}
		e.next, before.next = before.next, e
	}
	return false
}

// busy appends the keys that reads are to pass over.
func (l *lane) busy(keys []string) []string {
	for key, c := range l.chains {
		if c.length > maxWaiting {
			keys = append(keys, key)
		}
	}
	return keys
}

// take moves up to most publishable entries into flight. After a failure it
// gives the oldest failed entry alone, once nothing else is in flight: a probe.
func (l *lane) take(most int, now, deadline time.Time) []*entry {
	if now.Before(l.retryAt) || l.probing {
		return nil
	}
	var taken []*entry
	if len(l.failed) > 0 {
		if l.inFlight > 0 {
			return nil
		}
		taken = []*entry{l.failed[0]}
		l.failed = slices.Delete(l.failed, 0, 1)
		l.probing = true
	} else {
		taken = l.ready.pop(most)
	}
	for _, e := range taken {
		e.state, e.deadline = inFlight, deadline
	}
	l.inFlight += len(taken)
	return taken
}

// confirm settles an entry in flight and makes its key's next one ready.
func (l *lane) confirm(e *entry) {
	e.state = confirmed
	l.inFlight--
	if l.probing {
		// The way is open again: what failed with it goes out with the rest.
		l.probing = false
		l.retry.Reset()
		l.retryAt = time.Time{}
		for _, f := range l.failed {
			f.state = ready
		}
		l.ready.pushFront(l.failed)
		l.failed = nil
	}
	if e.Key == "" {
		return
	}
	c := l.chains[e.Key]
	c.head, c.length = e.next, c.length-1
	e.next = nil
	if c.length == maxWaiting {
		l.dry, l.unbusied = false, true // there may be more of the key
	}
	if c.head == nil {
		delete(l.chains, e.Key)
		return
	}
	c.head.state = ready
	l.ready.push(c.head)
}

// fail puts an entry in flight back. The lane waits, then probes with its oldest
// failed entry alone until that passes.
func (l *lane) fail(e *entry, now time.Time) {
	e.state = failed
	l.inFlight--
	l.probing = false
	at, _ := slices.BinarySearchFunc(l.failed, e, func(a, b *entry) int { return cmp.Compare(a.ID, b.ID) })
	l.failed = slices.Insert(l.failed, at, e)
	if !now.Before(l.retryAt) {
		l.retryAt = now.Add(l.retry.NextBackOff())
	}
}

// forget drops entries whose deletion has committed.
func (l *lane) forget(e *entry) {
	delete(l.entries, e.ID)
	l.bytes -= e.size()
	e.Payload, e.Metadata = nil, nil // its read's other entries may live on
}

// forgetUnsent drops what is neither in flight nor confirmed, to be read again.
// After an error the database may be another server, which lost its tail: what it
// does not hold any more must not be sent.
func (l *lane) forgetUnsent() {
	for id, e := range l.entries {
		switch e.state {
		case inFlight, confirmed:
		case waiting, ready, failed:
			delete(l.entries, id)
			l.bytes -= e.size()
		}
	}
	for key, c := range l.chains {
		if c.head.state != inFlight {
			delete(l.chains, key)
			continue
		}
		c.head.next, c.tail, c.length = nil, c.head, 1
	}
	l.ready, l.failed, l.dry = fifo{}, nil, false
}

// allConfirmed reports that the lane knows rows, and all of them are about to be
// deleted.
func (l *lane) allConfirmed() bool {
	return len(l.entries) > 0 && l.inFlight == 0 && l.ready.len() == 0 && len(l.failed) == 0
}

// hung reports that the sink owes an outcome that is long overdue. Such a lane's
// lease is not renewed.
func (l *lane) hung(now time.Time, grace time.Duration) bool {
	if l.inFlight == 0 {
		return false
	}
	for _, e := range l.entries {
		if e.state == inFlight && now.Sub(e.deadline) > grace {
			return true
		}
	}
	return false
}

// fifo is a queue of entries.
type fifo struct {
	items []*entry
	first int
}

func (q *fifo) len() int { return len(q.items) - q.first }

func (q *fifo) push(e *entry) {
	if q.first > len(q.items)/2 { // more popped than left: move down, amortised
		n := copy(q.items, q.items[q.first:])
		clear(q.items[n:])
		q.items, q.first = q.items[:n], 0
	}
	q.items = append(q.items, e)
}

func (q *fifo) pushFront(entries []*entry) {
	q.items, q.first = slices.Concat(entries, q.items[q.first:]), 0
}

func (q *fifo) pop(most int) []*entry {
	n := min(most, q.len())
	popped := slices.Clone(q.items[q.first : q.first+n])
	clear(q.items[q.first : q.first+n])
	q.first += n
	return popped
}
