package check

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/oncemill/oncemill/crucible/history"
)

// loss is C1: a message of a committed transaction is on the wire, and has one end.
func (c *index) loss() Result {
	r := Result{Checker: "C1", Promise: "no loss"}
	for i := range c.Txs {
		tx := &c.Txs[i]
		if tx.Outcome != history.Committed || c.lostTx(tx) {
			continue
		}
		for _, m := range tx.Messages {
			if !m.Discarded && c.sent[m.ID] == nil {
				c.counts.Lost++
				r.found("message %s of the committed transaction %s is not in the database", m.ID, tx.ID)
			}
		}
	}
	for i := range c.Sent {
		s := &c.Sent[i]
		if problem := c.missing(s); problem != "" {
			c.counts.Lost++
			r.found("message %s (%s %s %d %s) %s", s.MessageID, s.Topic, s.Key, s.Seq, s.Mood, problem)
		}
	}
	for name, n := range c.Left {
		if n > 0 {
			r.found("%d left in %s", n, name)
		}
	}
	if c.Balance.Accounts != c.Balance.Opened || c.Balance.Mirror != 0 {
		r.found("the sum of the money has changed: %+v", c.Balance)
	}
	return r
}

// missing returns what a message lacks.
func (c *index) missing(s *Sent) string {
	relayLetter, consumerLetter := false, false
	for _, l := range c.letters[s.MessageID] {
		ended := l.open() || l.State == "discarded"
		relayLetter = relayLetter || l.Source == "relay" && ended
		consumerLetter = consumerLetter || l.Source == "consumer" && ended
	}
	switch {
	case relayLetter:
		return ""
	case c.first[s.MessageID] == nil:
		return "was never on the wire"
	case c.Consumers[s.Topic] == "", consumerLetter, len(c.effects[s.MessageID]) > 0, c.lostEffect(s.MessageID):
		return ""
	}
	return "was on the wire but has neither an effect nor a dead letter"
}

// ghosts is C2: what is on the wire or has an effect was committed.
func (c *index) ghosts() Result {
	r := Result{Checker: "C2", Promise: "no ghost"}
	for id, copies := range c.copies {
		switch {
		case c.sent[id] != nil:
		case c.lostOnWire(id):
			c.counts.LostByServer.OnWire++
		default:
			c.counts.Ghosts++
			r.found("message %s of topic %s is on the wire and was never committed", id, copies[0].Topic)
		}
	}
	for id := range c.effects {
		if c.sent[id] == nil && !c.lostOnWire(id) {
			c.counts.Ghosts++
			r.found("message %s has an effect and was never committed", id)
		}
	}
	for _, tx := range c.Txs {
		for _, m := range tx.Messages {
			if (m.Discarded || tx.Outcome == history.RolledBack) && c.sent[m.ID] != nil {
				c.counts.Ghosts++
				r.found("message %s of transaction %s was rolled back and is committed", m.ID, tx.ID)
			}
		}
	}
	return r
}

// once is C3: one effect of a message, and no copy on the wire that no fault explains.
func (c *index) once() Result {
	r := Result{Checker: "C3", Promise: "one effect"}
	committed := map[string]bool{}
	for i := range c.Sent {
		if id := c.Sent[i].MessageID; committed[id] {
			c.counts.DoubleEffects++
			r.found("message %s was committed twice", id)
		}
		committed[c.Sent[i].MessageID] = true
	}
	for id, effects := range c.effects {
		s := c.sent[id]
		if s == nil {
			continue // a ghost
		}
		for _, e := range effects {
			if e.Consumer != c.Consumers[s.Topic] {
				r.found("message %s of topic %s has an effect of %s", id, s.Topic, e.Consumer)
			}
		}
		if len(effects) > 1 {
			c.counts.DoubleEffects += len(effects) - 1
			r.found("message %s has %d effects of %s", id, len(effects), effects[0].Consumer)
		}
	}
	for id, copies := range c.copies {
		c.counts.WireDuplicates += len(copies) - 1
		for i, again := range copies[1:] {
			if !c.explained(copies[i], again) {
				c.counts.Unexplained++
				r.found("message %s %s, and no fault explains it", id, c.resent(copies[i], again))
			}
		}
	}
	return r
}

// explained reports whether a fault of a relay, or of what it needs, lies between two copies
// of a message, or ended shortly before the first; or a relay has replaced the channel of its lane.
func (c *index) explained(copied, again *Copy) bool {
	first := copied.At.Add(-2 * c.Lease)
	explains := func(f Fault) bool {
		return f.From.Before(again.At) && f.To.After(first) && mayResend(f, again.Topic)
	}
	replaced := func(at time.Time) bool { return at.After(first) && at.Before(again.At) }
	return slices.ContainsFunc(c.Faults, explains) || slices.ContainsFunc(c.Slow, explains) ||
		slices.ContainsFunc(c.Resent[LaneOf(again.Key, again.MessageID)], replaced)
}

// resent tells where, when and by whom a message was sent and then sent again.
func (c *index) resent(first, again *Copy) string {
	lane := LaneOf(first.Key, first.MessageID)
	by := func(at time.Time) string {
		for _, t := range tenures(c.LaneWrites)[lane] {
			if !at.Before(t.From) && at.Before(t.To) {
				return fmt.Sprintf("%s, which took the lane at %s", t.relay, t.From.Format(clock))
			}
		}
		return "no known relay"
	}
	return fmt.Sprintf("of topic %s and lane %d was sent at %s by %s, and again at %s by %s", first.Topic, lane,
		first.At.Format(clock), by(first.At), again.At.Format(clock), by(again.At))
}

// mayResend reports whether a fault can be the cause that a relay sends a message again.
func mayResend(f Fault, topic string) bool {
	switch what, name, _ := strings.Cut(f.Target, " "); what {
	case "postgres", "rabbitmq", "crucible", Cluster:
		return true
	case "topic":
		return name == topic
	case "table", "rows":
		return !slices.Contains(inboxTables, f.Target) && name != "accounts"
	}
	return strings.HasPrefix(f.Target, "relay-")
}

// order is C4: first copies are in the order of the key, unless a message was a dead letter of
// the relay in between, perhaps one that the server lost; effects of the first hop too, unless it
// was a dead letter of any, or handled before and the server lost that. The order of the second hop is
// that in which the first hop's handlers have committed.
func (c *index) order() Result {
	r := Result{Checker: "C4", Promise: "order"}
	last := map[string]int64{}
	owed := map[string]int64{} // last, without what was sent when the server lost what it had acknowledged
	for i := range c.Wire {
		copied := &c.Wire[i]
		s := c.sent[copied.MessageID]
		if c.first[copied.MessageID] != copied || s == nil || s.Key == "" || c.diedAtRelay(s.MessageID) {
			continue
		}
		if copied.Redelivered && copied.Session > 1 {
			continue // the broker had delivered it before, to a connection that was lost
		}
		number := s.Seq
		if s.Topic == secondHop {
			number = s.Entry
		}
		revived := s.Mood == refused && number > owed[s.Key] // perhaps; nothing that counts is before it
		if number < last[s.Key] && !revived {
			c.counts.Reordered++
			r.found("number %d of key %s is on the wire behind number %d", number, s.Key, last[s.Key])
		}
		last[s.Key] = max(last[s.Key], number)
		if !c.sentLossy(copied) {
			owed[s.Key] = max(owed[s.Key], number)
		}
	}
	ordered := slices.Clone(c.Effects)
	slices.SortFunc(ordered, func(a, b Effect) int { return cmp.Compare(a.Entry, b.Entry) })
	clear(last)
	for _, e := range ordered {
		if e.Consumer != firstHop || c.sent[e.MessageID] == nil || c.hasLetter(e.MessageID) || c.effects[e.MessageID][0].Entry != e.Entry {
			continue // without a transaction, its number may have been given out again
		}
		if c.handledAgain(e.MessageID) {
			continue
		}
		if e.Seq < last[e.Key] {
			c.counts.Reordered++
			r.found("number %d of key %s has its effect behind number %d", e.Seq, e.Key, last[e.Key])
		}
		last[e.Key] = max(last[e.Key], e.Seq)
	}
	return r
}

const (
	firstHop  = "ledger"   // the consumer that keeps the order
	secondHop = "receipts" // the topic whose keys have the order of the first hop's effects
)

func (c *index) diedAtRelay(id string) bool {
	return slices.ContainsFunc(c.letters[id], func(l *Letter) bool { return l.Source == "relay" })
}

func (c *index) hasLetter(id string) bool { return len(c.letters[id]) > 0 }

// exclusive is C5: no message is both dead and delivered.
func (c *index) exclusive() Result {
	r := Result{Checker: "C5", Promise: "dead letters exclusive"}
	for id, letters := range c.letters {
		effects := len(c.effects[id])
		open, replayed := 0, 0
		for _, l := range letters {
			if l.Source == "relay" {
				if l.open() && c.first[id] != nil && !l.MaybeDelivered && !c.lossy(c.first[id].At) {
					c.counts.DeadAndDelivered++
					r.found("message %s is a dead letter of the relay and on the wire", id)
				}
				continue
			}
			switch {
			case l.open(), l.State == "discarded":
				open++
			case l.State == "replayed":
				replayed++
			default:
				r.found("dead letter %d of message %s is still %s", l.ID, id, l.State)
			}
		}
		if open > 1 {
			r.found("message %s has %d dead letters", id, open)
		}
		if open > 0 && effects > 0 {
			c.counts.DeadAndDelivered++
			r.found("message %s is dead and has %d effects", id, effects)
		}
		if open == 0 && replayed > 0 && effects == 0 {
			r.found("message %s was replayed and has no effect", id)
		}
	}
	return r
}

// consistent is C6: what a handler produced comes from the attempt that left the effect.
func (c *index) consistent() Result {
	r := Result{Checker: "C6", Promise: "consistent output"}
	attempts := map[string]bool{}
	for i := range c.Effects {
		attempts[c.Effects[i].Attempt] = true
	}
	produced := map[string]int{}
	for id, copied := range c.first {
		s := c.sent[id]
		if s == nil || s.Topic != secondHop {
			continue
		}
		if copied.Attempt != s.Tx || !attempts[copied.Attempt] {
			r.found("message %s comes from attempt %s, which left no effect", id, copied.Attempt)
		}
		produced[copied.Attempt]++
	}
	for i := range c.Effects {
		if e := &c.Effects[i]; e.Consumer == firstHop && produced[e.Attempt] != 1 {
			r.found("the attempt that handled message %s has %d messages on the wire", e.MessageID, produced[e.Attempt])
		}
	}
	return r
}

// intact is C8: the content is the same everywhere.
func (c *index) intact() Result {
	r := Result{Checker: "C8", Promise: "payload intact"}
	damaged := func(id, where string) {
		c.counts.Damaged++
		r.found("message %s is damaged %s", id, where)
	}
	for i := range c.Wire {
		w := &c.Wire[i]
		if s := c.sent[w.MessageID]; s != nil && (s.Sum != w.Sum || s.Topic != w.Topic || s.Key != w.Key) {
			damaged(w.MessageID, "on the wire")
		}
	}
	for i := range c.Effects {
		e := &c.Effects[i]
		if s := c.sent[e.MessageID]; s != nil && (s.Sum != e.Sum || s.Key != e.Key) {
			damaged(e.MessageID, "in the handler")
		}
	}
	for i := range c.Letters {
		l := &c.Letters[i]
		if s := c.sent[l.MessageID]; s != nil && s.Sum.Payload != l.Payload {
			damaged(l.MessageID, "in its dead letter")
		}
	}
	return r
}

// fenced is C9: nothing is written for a lane by another than the owner of its epoch.
func (c *index) fenced() Result {
	r := Result{Checker: "C9", Promise: "fencing"}
	type term struct {
		lane  int
		epoch int64
	}
	owners := map[term]string{}
	writes := 0
	for _, w := range c.LaneWrites {
		t := term{w.Lane, w.Epoch}
		switch owner := owners[t]; {
		case w.Kind == LaneTaken && owner != "":
			r.found("lane %d was taken twice with epoch %d, by %s and %s", w.Lane, w.Epoch, owner, w.Writer)
		case w.Kind == LaneTaken:
			owners[t] = w.Writer
		default:
			writes++
			if w.Writer != owner {
				r.found("%s on lane %d by %s, while epoch %d belonged to %q", w.Kind, w.Lane, w.Writer, w.Epoch, owner)
			}
		}
	}
	r.Note = fmt.Sprintf("%d writes under %d leases", writes, len(owners))
	return r
}
