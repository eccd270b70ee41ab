package outbox

import (
	"fmt"
	"reflect"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
)

// Publisher writes messages to the outbox, in a transaction that it does not
// own. It implements Watermill's message.Publisher. A context-bound publisher
// may be used by many goroutines at once; a transaction-bound one by as many as
// its transaction allows, that is one.
type Publisher struct {
	box *Outbox
	tx  oncemill.Tx // nil: taken from the message's context
}

var _ message.Publisher = (*Publisher)(nil)

// Publish writes all messages with one INSERT, in their order, and those for
// later ([SetDeliverAt], [SetDeliverAfter]) with one of their own. Bad messages are
// reported as a [*MessageError], what Config.Payload cannot encode with an error
// of package payload, both before any SQL is sent; an error of the database
// leaves the caller's transaction to the caller, who has to roll it back.
//
// A statement takes at most 10,000 messages (on SQLite, which has no round trips to
// save, 100) and 8 MiB of payload and metadata; more of them take several.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	all, waits := make([]Row, len(messages)), make([]delay, len(messages))
	for i, msg := range messages {
		var err error
		if all[i], waits[i], err = p.box.newRow(i, topic, msg); err != nil {
			return err
		}
	}
	tx := p.tx
	if tx == nil {
		var err error
		if tx, err = txOfMessages(messages); err != nil {
			return err
		}
	}
	if err := p.box.encode(all, messages); err != nil {
		return err
	}
	rows, later := apart(all, waits)
	ctx := messages[0].Context()
	if err := p.box.store.insert(ctx, tx, rows); err != nil {
		return fmt.Errorf("outbox: insert: %w", err)
	}
	if err := p.box.store.schedule(ctx, tx, later); err != nil {
		return fmt.Errorf("outbox: schedule: %w", err)
	}
	return nil
}

// apart separates what is for now from what is for later.
func apart(all []Row, waits []delay) (now []Row, later []scheduledRow) {
	now = all[:0]
	for i, row := range all {
		if waits[i].scheduled {
			later = append(later, scheduledRow{row, waits[i]})
		} else {
			now = append(now, row)
		}
	}
	return now, later
}

// Close does nothing: a Publisher holds nothing. The transaction stays open.
func (p *Publisher) Close() error { return nil }

func txOfMessages(messages []*message.Message) (oncemill.Tx, error) {
	var tx oncemill.Tx
	for i, msg := range messages {
		found, ok := oncemill.TxFromContext(msg.Context())
		switch {
		case !ok:
			return nil, ErrNoTx
		case i > 0 && !reflect.ValueOf(found).Comparable():
			return nil, fmt.Errorf("%w, or the same of type %T, which cannot be compared; put a pointer into the context", ErrMixedTx, found)
		case i > 0 && found != tx:
			return nil, ErrMixedTx
		}
		tx = found
	}
	return tx, nil
}
