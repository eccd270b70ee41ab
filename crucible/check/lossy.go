package check

import (
	"slices"
	"time"

	"github.com/oncemill/oncemill/crucible/history"
)

// LostByServer counts what a PostgreSQL without synchronous standbys had acknowledged, and has
// lost when a standby took over. Nobody can keep it: its clients, and other servers, have acted
// on it. It is lost as a whole, in the times that Input.Lossy names. Everything else is judged
// as ever: what the new primary has is delivered once and in order.
type LostByServer struct {
	Transactions int // of producers, each with all its messages
	OnWire       int // messages of such transactions that were sent before
	Effects      int // and dead letters: their deliveries were acknowledged to the broker
	Answers      int // to requests with idempotency keys
}

func (c *index) lossy(at time.Time) bool { return c.lossyWithin(Window{at, at}) }

// lossyWithin reports whether the server may have lost something of a span of time.
func (c *index) lossyWithin(s Window) bool {
	return slices.ContainsFunc(c.Lossy, func(w Window) bool { return !s.To.Before(w.From) && !s.From.After(w.To) })
}

// kept reports whether a message of a transaction is in the database, and so all of it.
func (c *index) kept(tx *Tx) bool {
	return slices.ContainsFunc(tx.Messages, func(m history.Message) bool { return c.sent[m.ID] != nil })
}

// lostTx reports whether the server lost a transaction that its producer knows as committed.
func (c *index) lostTx(tx *Tx) bool {
	if c.kept(tx) || !c.lossy(tx.Ended) {
		return false
	}
	c.counts.LostByServer.Transactions++
	return true
}

// lostOnWire reports whether a message without a transaction in the database had one, which
// the server lost. What was rolled back, or belongs to a transaction that was kept, had none.
func (c *index) lostOnWire(id string) bool {
	first, tx := c.first[id], c.origin[id]
	if first == nil {
		return false
	}
	if tx != nil {
		discarded := slices.ContainsFunc(tx.Messages, func(m history.Message) bool { return m.ID == id && m.Discarded })
		if discarded || tx.Outcome == history.RolledBack || c.kept(tx) {
			return false
		}
		if tx.Outcome == history.Committed {
			return c.lossy(tx.Ended)
		}
	}
	// When it was committed is not known; it was before this.
	return c.sentLossy(first)
}

// sentLossy reports whether a relay may have sent a copy because of what the server lost.
func (c *index) sentLossy(sent *Copy) bool { return c.lossyWithin(Window{sent.At.Add(-late), sent.At}) }

// late is how long a relay may send what it has read from a primary that is no more.
const late = 8 * time.Second

// lostEffect reports whether the server lost the effect, or the dead letter, of a message, which
// a consumer knows as handled.
func (c *index) lostEffect(id string) bool {
	lost := slices.ContainsFunc(c.Settled[id], c.lossy)
	if lost {
		c.counts.LostByServer.Effects++
	}
	return lost
}

// handledAgain reports whether a consumer may have handled a copy of a message because the server lost
// what came of an earlier one. Its successors have been handled meanwhile.
func (c *index) handledAgain(id string) bool {
	if len(c.Settled[id]) < 2 {
		return false
	}
	last := slices.MaxFunc(c.Settled[id], time.Time.Compare)
	return slices.ContainsFunc(c.Settled[id], func(at time.Time) bool { return at.Before(last) && c.lossy(at) })
}

// lostAnswer reports whether the server lost the transaction that an answer belongs to.
func (c *index) lostAnswer(a Answer) bool {
	lost := c.lossy(a.At)
	if lost {
		c.counts.LostByServer.Answers++
	}
	return lost
}
