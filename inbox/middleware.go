package inbox

import (
	"context"
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
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		result, err := in.attempt(ctx, msg, h)
		in.telemetry.record(ctx, result)
		// What h returned is in the outbox: the router has nothing to publish.
		return nil, err
	}
}

func (in *Inbox) attempt(ctx context.Context, msg *message.Message, h message.HandlerFunc) (outcome, error) {
	restore, err := in.decode(ctx, msg)
	if err != nil {
		return badPayload, err
	}
	defer restore()
	id := messageID{consumer: in.cfg.Consumer, message: in.cfg.ID(msg)}
	if err := checkMessageID(id.message); err != nil {
		return badMessageID, err
	}
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
		in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "duplicate acknowledged",
			slog.String("consumer", id.consumer), slog.String("message_id", id.message))
		return duplicate, nil
	}

	borrowed := lend(in.store, in.cfg.Database.Dialect, id, tx)
	produced, err := run(ctx, borrowed, msg, h)
	if err == nil && len(produced) > 0 {
		err = in.publish(ctx, borrowed, produced)
	}
	if reason := borrowed.Close(ErrTxEnded); err == nil && reason != nil {
		// The handler has overlooked what its statement returned.
		err = reason
	}
	if err != nil {
		return handlerFailed, err
	}
	if err := in.store.seal(ctx, tx, id); err != nil {
		return databaseFailed, err
	}
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
func run(ctx context.Context, borrowed *handle, msg *message.Message, h message.HandlerFunc) (produced []*message.Message, err error) {
	msg.SetContext(oncemill.ContextWithTx(ctx, borrowed))
	defer msg.SetContext(ctx)
	defer func() {
		if v := recover(); v != nil {
			produced, err = nil, &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return h(msg)
}

func (in *Inbox) publish(ctx context.Context, borrowed *handle, produced []*message.Message) error {
	if in.cfg.Outbox == nil {
		return ErrNoOutbox
	}
	topic := message.PublishTopicFromCtx(ctx)
	if topic == "" {
		return ErrNoTopic
	}
	return in.cfg.Outbox.Publisher(borrowed).Publish(topic, produced...) //nolint:contextcheck // Watermill's Publish takes none; the messages and the transaction have theirs
}

func claimFailed(err error) outcome {
	if errors.Is(err, ErrBeingHandled) {
		return beingHandled
	}
	return databaseFailed
}
