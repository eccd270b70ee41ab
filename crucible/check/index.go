package check

import (
	"github.com/oncemill/oncemill/crucible/history"
)

// index is the input, arranged for the checkers.
type index struct {
	*Input

	sent    map[string]*Sent // by message id
	first   map[string]*Copy // the first copy of each message
	copies  map[string][]*Copy
	effects map[string][]*Effect // by message id, those of the consumer of its topic
	letters map[string][]*Letter // by message id
	origin  map[string]*Tx       // by message id, those of producers
	counts  Counts
}

func newIndex(in *Input) *index {
	c := &index{
		Input: in, sent: map[string]*Sent{}, first: map[string]*Copy{}, copies: map[string][]*Copy{},
		effects: map[string][]*Effect{}, letters: map[string][]*Letter{}, origin: map[string]*Tx{},
	}
	for i := range in.Sent {
		c.sent[in.Sent[i].MessageID] = &in.Sent[i]
	}
	for i := range in.Wire {
		c.addCopy(&in.Wire[i])
	}
	for i := range in.Effects {
		c.effects[in.Effects[i].MessageID] = append(c.effects[in.Effects[i].MessageID], &in.Effects[i])
	}
	for i := range in.Letters {
		c.letters[in.Letters[i].MessageID] = append(c.letters[in.Letters[i].MessageID], &in.Letters[i])
		c.counts.DeadLetters++
		switch in.Letters[i].State {
		case "replayed":
			c.counts.Replayed++
		case "discarded":
			c.counts.Discarded++
		}
	}
	c.counts.Messages, c.counts.Effects = len(in.Sent), len(in.Effects)
	for i := range in.Txs {
		tx := &in.Txs[i]
		for _, m := range tx.Messages {
			c.origin[m.ID] = tx
		}
		c.counts.Transactions++
		switch tx.Outcome {
		case history.RolledBack:
			c.counts.RolledBack++
		case history.Unknown, "":
			c.counts.Unknown++
		}
	}
	return c
}

// addCopy counts a copy, unless the recorder itself got it twice: the broker delivers again
// what the recorder had not acknowledged when it lost its connection.
func (c *index) addCopy(copied *Copy) {
	before := c.copies[copied.MessageID]
	if copied.Redelivered && len(before) > 0 && before[len(before)-1].Session < copied.Session {
		return
	}
	c.counts.Copies++
	c.copies[copied.MessageID] = append(before, copied)
	if len(before) == 0 {
		c.first[copied.MessageID] = copied
	}
}
