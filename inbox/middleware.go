package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Middleware is a Watermill message.HandlerMiddleware. It runs h in a
// transaction that also holds the id of the message and the messages that h
// returns, and reports success once that has committed; then the router
// acknowledges. A copy of a message that was handled before is reported as
// success without running h. After any error, or a panic (reported as a
// [*PanicError]), nothing of the attempt is left.
//
// Add it last, so that it is next to the handler: a middleware that retries or
// limits the time belongs outside of the transaction. The handler must not
// acknowledge the message itself.
func (in *Inbox) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return in.middleware(h, in.alone)
}

// attempt is one try to handle a message.
type attempt func(ctx context.Context, msg *message.Message, id string, h message.HandlerFunc) (outcome, error)

func (in *Inbox) middleware(h message.HandlerFunc, try attempt) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		id := in.cfg.ID(msg)
		result, err := badMessageID, checkMessageID(id)
		if err == nil {
			result, err = try(ctx, msg, id, h)
		}
		in.telemetry.record(ctx, result)
		// What h returned is in the outbox: the router has nothing to publish.
		return nil, err
	}
}

// alone is an attempt in a transaction of its own.
func (in *Inbox) alone(ctx context.Context, msg *message.Message, of string, h message.HandlerFunc) (outcome, error) {
	id := messageID{consumer: in.cfg.Consumer, message: of}
	tx, err := in.store.begin(ctx)
	if err != nil {
		return claimFailed(err), fmt.Errorf("begin: %w", err)
	}
	// A no-op after the commit. Otherwise it gives the connection back, also
	// when the handler ends its goroutine, and its own error adds nothing: the
	// database rolls back what it lost the connection of.
	defer tx.Rollback() //nolint:errcheck // see above
	claimed, err := in.store.claim(ctx, tx, id)
	if err != nil {
		return claimFailed(err), err
	}
	if !claimed {
		in.logDuplicate(ctx, id.message)
		return duplicate, nil
	}
	if err := in.effect(ctx, tx, msg, id, h); err != nil {
		return handlerFailed, err
	}
	if err := in.store.seal(ctx, tx, id); err != nil {
		return databaseFailed, err
	}
	return in.commit(ctx, tx)
}

func (in *Inbox) logDuplicate(ctx context.Context, id string) {
	in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "duplicate acknowledged",
		slog.String("consumer", in.cfg.Consumer), slog.String("message_id", id))
}

// effect runs the handler in tx and writes what it returns to the outbox.
func (in *Inbox) effect(ctx context.Context, tx *sql.Tx, msg *message.Message, id messageID, h message.HandlerFunc) error {
	lent := &handle{store: in.store, dialect: in.cfg.Database.Dialect, id: id, tx: tx}
	// Also when the handler ends its goroutine.
	defer lent.close(ErrTxEnded) //nolint:errcheck // its reason was asked for, or nobody is there to hear it
	produced, err := run(ctx, lent, msg, h)
	if err == nil && len(produced) > 0 {
		err = in.publish(ctx, lent, produced)
	}
	if reason := lent.close(ErrTxEnded); err == nil && reason != nil {
		// The handler has overlooked what its statement returned.
		err = reason
	}
	return err
}

func (in *Inbox) commit(ctx context.Context, tx *sql.Tx) (outcome, error) {
	// Once Commit has been called, a context's error may come from after the
	// commit was sent.
	if err := ctx.Err(); err != nil {
		return databaseFailed, fmt.Errorf("commit: %w", err)
	}
	if err := tx.Commit(); err != nil {
		if sqlerr.CommitUnknown(err) {
			return commitUnknown, fmt.Errorf("%w: %w", ErrCommitUnknown, err)
		}
		return databaseFailed, fmt.Errorf("commit: %w", err)
	}
	if in.cfg.Outbox != nil {
		in.cfg.Outbox.Wake()
	}
	return handled, nil
}

// run calls the handler with the transaction in the context of its message.
func run(ctx context.Context, lent *handle, msg *message.Message, h message.HandlerFunc) (produced []*message.Message, err error) {
	msg.SetContext(oncemill.ContextWithTx(ctx, lent))
	defer msg.SetContext(ctx)
	defer func() {
		if v := recover(); v != nil {
			produced, err = nil, &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return h(msg)
}

func (in *Inbox) publish(ctx context.Context, lent *handle, produced []*message.Message) error {
	if in.cfg.Outbox == nil {
		return ErrNoOutbox
	}
	topic := message.PublishTopicFromCtx(ctx)
	if topic == "" {
		return ErrNoTopic
	}
	return in.cfg.Outbox.Publisher(lent).Publish(topic, produced...) //nolint:contextcheck // Watermill's Publish takes none; the messages and the transaction have theirs
}

func claimFailed(err error) outcome {
	if errors.Is(err, ErrBeingHandled) {
		return beingHandled
	}
	return databaseFailed
}
