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

func (c *index) lossy(at time.Time) bool {
	return slices.ContainsFunc(c.Lossy, func(w Window) bool { return !at.Before(w.From) && !at.After(w.To) })
}

// lostTx reports whether the server lost a transaction that its producer knows as committed.
func (c *index) lostTx(tx *Tx) bool {
	kept := slices.ContainsFunc(tx.Messages, func(m history.Message) bool { return c.sent[m.ID] != nil })
	if kept || !c.lossy(tx.Ended) {
		return false
	}
	c.counts.LostByServer.Transactions++
	return true
}

// lostOnWire reports whether a message without a transaction in the database had one, which
// the server lost.
func (c *index) lostOnWire(id string) bool {
	first := c.first[id]
	if first == nil {
		return false
	}
	ended := first.At // at the latest, where nobody has written it down: handlers and services
	if tx := c.origin[id]; tx != nil && tx.Outcome == history.RolledBack {
		return false
	} else if tx != nil && !tx.Ended.IsZero() {
		ended = tx.Ended
	}
	return c.lossy(ended) || c.lossy(first.At)
}

// lostEffect reports whether the server lost the effect, or the dead letter, of a message.
func (c *index) lostEffect(id string) bool {
	lost := slices.ContainsFunc(c.copies[id], func(sent *Copy) bool { return c.lossy(sent.At) })
	if lost {
		c.counts.LostByServer.Effects++
	}
	return lost
}

// lostAnswer reports whether the server lost the transaction that an answer belongs to.
func (c *index) lostAnswer(a Answer) bool {
	lost := c.lossy(a.At)
	if lost {
		c.counts.LostByServer.Answers++
	}
	return lost
}
