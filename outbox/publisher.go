package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
)

// Publish writes messages to the outbox in tx, which the caller began and ends: they
// exist if and only if it commits. For a pgx.Tx see [oncemill.FromPgx]. As many
// goroutines may call it at once as the transaction allows, that is one.
//
// ctx ends the statements, and is what Config.Payload works under. A message goes on
// with the trace of its own context (message.SetContext), if that has a span, or else
// with that of ctx.
//
// All messages are written with one INSERT, in their order, and those for later
// ([SetDeliverAt], [SetDeliverAfter]) with one of their own. A statement takes at most
// 10,000 messages (on SQLite, which has no round trips to save, 100) and 8 MiB of
// payload and metadata; more of them take several.
//
// Bad messages are reported as a [*MessageError], what Config.Payload cannot encode
// with an error of package payload, and a tx that is nil with [ErrNoTx], all before any
// SQL is sent. An error of the database leaves the transaction to the caller, who has
// to roll it back.
func (o *Outbox) Publish(ctx context.Context, tx oncemill.Tx, topic string, messages ...*message.Message) error {
	return o.publish(ctx, topic, messages, func() (oncemill.Tx, error) {
		if isNil(tx) {
			return nil, ErrNoTx
		}
		return tx, nil
	})
}

// publish asks for the transaction when the messages are good.
func (o *Outbox) publish(ctx context.Context, topic string, messages []*message.Message, txOf func() (oncemill.Tx, error)) error {
	if len(messages) == 0 {
		return nil
	}
	all, waits := make([]Row, len(messages)), make([]delay, len(messages))
	for i, msg := range messages {
		var err error
		if all[i], waits[i], err = o.newRow(ctx, i, topic, msg); err != nil {
			return err
		}
	}
	tx, err := txOf()
	if err != nil {
		return err
	}
	if err := o.encode(ctx, all, messages); err != nil {
		return err
	}
	rows, later := apart(all, waits)
	if err := o.insert(ctx, tx, rows); err != nil {
		return fmt.Errorf("outbox: insert: %w", err)
	}
	if err := o.store.schedule(ctx, tx, later); err != nil {
		return fmt.Errorf("outbox: schedule: %w", err)
	}
	return nil
}

// isNil reports that there is no transaction. A variable of type *sql.Tx that was never
// set is none either.
func isNil(tx oncemill.Tx) bool {
	raw, ok := tx.(*sql.Tx)
	return tx == nil || ok && raw == nil
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

// Publisher is [Outbox.Publish] as a message.Publisher of Watermill, which has no
// context: that of the first message counts. One that is bound to the context may be
// used by many goroutines at once; one that is bound to a transaction by as many as
// that allows, that is one.
type Publisher struct {
	box *Outbox
	tx  oncemill.Tx // nil: taken from the message's context
}

var _ message.Publisher = (*Publisher)(nil)

// Publisher returns a Watermill publisher that writes in tx. It is cheap: make one for
// each transaction.
func (o *Outbox) Publisher(tx oncemill.Tx) *Publisher {
	return &Publisher{box: o, tx: tx}
}

// ContextPublisher returns a Watermill publisher that writes in the transaction that it
// finds in each message's context (oncemill.ContextWithTx), so that one bus made at the
// start serves every transaction. A message without one is refused with [ErrNoTx].
func (o *Outbox) ContextPublisher() *Publisher {
	return &Publisher{box: o}
}

// Publish is [Outbox.Publish] under the context of the first message.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	switch {
	case len(messages) == 0:
		return nil
	case messages[0] == nil:
		return &MessageError{Field: "message", Problem: "is nil"}
	}
	ctx := messages[0].Context()
	if p.tx != nil {
		return p.box.Publish(ctx, p.tx, topic, messages...)
	}
	return p.box.publish(ctx, topic, messages, func() (oncemill.Tx, error) { return txOfMessages(messages) })
}

// Close does nothing: a Publisher holds nothing. The transaction stays open.
func (p *Publisher) Close() error { return nil }

// txOfMessages returns the transaction in the context of the messages.
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
