package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"reflect"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/txcontext"
)

// Publish writes messages to the outbox in tx, which the caller began and ends. The
// messages exist if and only if tx commits. For a pgx.Tx see [oncemill.FromPgx].
// Publish allows as many concurrent calls as the transaction does, that is one.
//
// ctx bounds the statements and is passed to Config.Payload. A message continues the
// trace of its own context (message.SetContext) if that has a span, otherwise the trace
// of ctx.
//
// All messages are written with one INSERT, in their order, and scheduled messages
// ([SetDeliverAt], [SetDeliverAfter]) with a second one. A statement takes at most
// 10,000 messages (on SQLite, which has no round trips to save, 100) and 8 MiB of
// payload and metadata. More messages take several statements.
//
// Errors are reported before any SQL is sent: a bad message as a [*MessageError], a
// message that Config.Payload cannot encode as an error of package payload, a nil tx as
// [ErrNoTx]. After a database error the caller has to roll the transaction back.
func (o *Outbox) Publish(ctx context.Context, tx oncemill.ExecTx, topic string, messages ...*message.Message) error {
	own := func() (oncemill.ExecTx, error) { return tx, nil }
	return o.publish(ctx, topic, messages, own, func(msg *message.Message) context.Context {
		if trace.SpanContextFromContext(msg.Context()).IsValid() {
			return msg.Context()
		}
		return ctx
	})
}

// tracer returns the context whose trace a message continues.
type tracer func(msg *message.Message) context.Context

// publish asks for the transaction once the messages are known to be good.
func (o *Outbox) publish(ctx context.Context, topic string, messages []*message.Message, txOf func() (oncemill.ExecTx, error), of tracer) error {
	if len(messages) == 0 {
		return nil
	}
	all, waits := make([]outboxstore.Row, len(messages)), make([]delay, len(messages))
	for i, msg := range messages {
		var err error
		if all[i], waits[i], err = o.newRow(of, i, topic, msg); err != nil { //nolint:contextcheck // a context only for the trace
			return err
		}
	}
	tx, err := txOf()
	switch {
	case err != nil:
		return err
	case isNil(tx):
		return ErrNoTx
	}
	if err := o.encode(ctx, of, all, messages); err != nil {
		return err
	}
	rows, later := apart(all, waits)
	if err := o.insert(ctx, tx, rows); err != nil {
		return fmt.Errorf("outbox: insert: %w", err)
	}
	if err := o.store.Schedule(ctx, tx, later); err != nil {
		return fmt.Errorf("outbox: schedule: %w", err)
	}
	o.logStored(ctx, rows, later)
	return nil
}

// logStored logs what exists once the transaction commits.
func (o *Outbox) logStored(ctx context.Context, rows []outboxstore.Row, later []outboxstore.ScheduledRow) {
	if !o.cfg.Logger.Enabled(ctx, slog.LevelDebug) {
		return
	}
	for _, r := range rows {
		o.cfg.Logger.DebugContext(ctx, "message stored", "topic", r.Topic, "lane", r.Lane, "message_id", r.MessageID, "key", r.Key)
	}
	for _, r := range later {
		o.cfg.Logger.DebugContext(ctx, "message scheduled", "topic", r.Topic, "lane", r.Lane, "message_id", r.MessageID, "key", r.Key)
	}
}

// isNil reports whether there is no transaction. That includes a *sql.Tx variable that
// was never set.
func isNil(tx oncemill.ExecTx) bool {
	raw, ok := tx.(*sql.Tx)
	return tx == nil || ok && raw == nil
}

// apart separates messages for now from scheduled messages.
func apart(all []outboxstore.Row, waits []delay) (now []outboxstore.Row, later []outboxstore.ScheduledRow) {
	now = all[:0]
	for i, row := range all {
		if waits[i].scheduled {
			later = append(later, outboxstore.ScheduledRow{Row: row, Micros: waits[i].micros, Relative: waits[i].relative})
		} else {
			now = append(now, row)
		}
	}
	return now, later
}

// Publisher is [Outbox.Publish] as a Watermill message.Publisher, which has no context:
// the first message's context is used. A context-bound publisher is safe for concurrent
// use. A publisher bound to a transaction allows as many concurrent calls as that does,
// that is one.
type Publisher struct {
	box  *Outbox
	txOf func(messages []*message.Message) (oncemill.ExecTx, error)
}

var _ message.Publisher = (*Publisher)(nil)

// Publisher returns a Watermill publisher that writes in tx. It is cheap: make one for
// each transaction.
func (o *Outbox) Publisher(tx oncemill.ExecTx) *Publisher {
	return &Publisher{box: o, txOf: func([]*message.Message) (oncemill.ExecTx, error) { return tx, nil }}
}

// ContextPublisher returns a Watermill publisher that writes in the transaction in each
// message's context (oncemill.ContextWithTx). One event bus, created at startup, can
// thus serve every transaction. A message without a transaction is refused with
// [ErrNoTx].
func (o *Outbox) ContextPublisher() *Publisher {
	return &Publisher{box: o, txOf: txOfMessages}
}

// Publish is [Outbox.Publish] with the context of the first message. Each message
// continues the trace of its own context.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	switch {
	case len(messages) == 0:
		return nil
	case messages[0] == nil:
		return &MessageError{Field: "message", Problem: "is nil"}
	}
	tx := func() (oncemill.ExecTx, error) { return p.txOf(messages) }
	return p.box.publish(messages[0].Context(), topic, messages, tx, (*message.Message).Context)
}

// Close does nothing: a Publisher holds no resources. The transaction stays open.
func (p *Publisher) Close() error { return nil }

// txOfMessages returns the transaction in the context of the messages.
func txOfMessages(messages []*message.Message) (oncemill.ExecTx, error) {
	var tx oncemill.ExecTx
	for i, msg := range messages {
		found, ok := txcontext.From(msg.Context()).(oncemill.ExecTx)
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
