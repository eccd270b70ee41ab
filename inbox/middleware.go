package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/contain"
	"github.com/oncemill/oncemill/internal/lent"
	"github.com/oncemill/oncemill/internal/sqlerr"
)

// Middleware is a Watermill message.HandlerMiddleware. It runs h in a
// transaction that also holds the id of the message and the messages that h
// returns, and reports success once that has committed; then the router
// acknowledges. A copy of a message that was handled before is reported as
// success without running h. After any error, or a panic (reported as a
// [*oncemill.PanicError]), nothing of the attempt is left.
//
// Add it last, so that it is next to the handler: a middleware that retries or
// limits the time belongs outside of the transaction. The handler must not
// acknowledge the message itself.
func (in *Inbox) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return in.middleware(h, in.alone)
}

// alone is an attempt in a transaction of its own.
func (in *Inbox) alone(ctx context.Context, w *work) (outcome, error) {
	id := messageID{consumer: in.cfg.Consumer, message: w.id}
	tx, err := in.store.begin(ctx)
	if err != nil {
		return claimFailed(err), fmt.Errorf("begin: %w", err)
	}
	// A no-op after the commit. Otherwise it gives the connection back, also
	// when the handler ends its goroutine, and its own error adds nothing: the
	// database rolls back what it lost the connection of.
	defer tx.Rollback() //nolint:errcheck // see above
	claimed, err := in.claim(ctx, tx, id, w.fingerprint, w.replay)
	if err != nil {
		return claimFailed(err), err
	}
	if !claimed {
		return in.duplicate(ctx, tx, w)
	}
	if err := in.effect(ctx, tx, tx, w); err != nil {
		if in.store.gone(ctx, tx) {
			return databaseAway, err
		}
		return handlerFailed, err
	}
	if w.start.noted {
		if err := in.store.forgetFailures(ctx, tx, w.id); err != nil {
			return claimFailed(err), fmt.Errorf("forget failures: %w", err)
		}
	}
	if err := in.store.seal(ctx, tx, id); err != nil {
		return commitFailed(err), err
	}
	return in.commit(ctx, tx)
}

// claim takes the id. The id of a dead letter is taken by its replay alone, which ends
// with that.
func (in *Inbox) claim(ctx context.Context, tx *sql.Tx, id messageID, fingerprint []byte, r replay) (bool, error) {
	if r.marked && !r.fresh {
		if open, err := in.store.reopen(ctx, tx, id); err != nil || !open {
			return false, err
		}
	}
	claimed, err := in.store.claim(ctx, tx, id, fingerprint)
	if err != nil || !claimed || !r.marked {
		return claimed, err
	}
	return in.endReplay(ctx, tx, r)
}

// duplicate is an id that a committed transaction has.
func (in *Inbox) duplicate(ctx context.Context, tx *sql.Tx, w *work) (outcome, error) {
	if w.fingerprint != nil {
		same, err := in.store.sameFingerprint(ctx, tx, w.id, w.fingerprint)
		if err != nil {
			return claimFailed(err), fmt.Errorf("compare fingerprints: %w", err)
		}
		if !same {
			return conflict, ErrConflict
		}
	}
	if w.replay.letter != 0 { // of a message that is dead no more
		open, err := in.endReplay(ctx, tx, w.replay)
		if err == nil && open {
			_, err = in.commit(ctx, tx)
		}
		if err != nil {
			return claimFailed(err), fmt.Errorf("end replay: %w", err)
		}
	}
	if w.start.noted {
		_ = tx.Rollback() // if it is not committed: on SQLite its writes would be waited for
		in.noteEnd(ctx, w)
	}
	in.logDuplicate(ctx, w.id)
	return duplicate, nil
}

func (in *Inbox) logDuplicate(ctx context.Context, id string) {
	in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "duplicate acknowledged",
		slog.String("consumer", in.cfg.Consumer), slog.String("message_id", id))
}

// effect runs the handler in tx, by statements, and writes what it returns to the
// outbox. Functions of Config are called on the way, so it is contained as a whole.
func (in *Inbox) effect(ctx context.Context, tx *sql.Tx, statements lent.Statements, w *work) error {
	return contain.Call(func() error { return in.run(ctx, tx, statements, w) })
}

func (in *Inbox) run(ctx context.Context, tx *sql.Tx, statements lent.Statements, w *work) error {
	admitted, err := in.admit(ctx, tx, w)
	if err != nil || !admitted {
		return err
	}
	id := messageID{consumer: in.cfg.Consumer, message: w.id}
	borrowed := lend(in.store, in.cfg.Database.Dialect, id, tx, statements)
	// Also when the handler ends its goroutine.
	defer borrowed.Close(ErrTxEnded) //nolint:errcheck // its reason was asked for, or nobody is there to hear it
	produced, err := call(ctx, borrowed, w.msg, w.handler)
	if err == nil && len(produced) > 0 {
		err = in.publish(ctx, borrowed, produced)
	}
	if reason := borrowed.Close(ErrTxEnded); err == nil && reason != nil {
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
		return commitFailed(err), fmt.Errorf("commit: %w", err)
	}
	if in.cfg.Outbox != nil {
		in.cfg.Outbox.Wake()
	}
	return handled, nil
}

// call calls the handler with the transaction in the context of its message.
func call(ctx context.Context, borrowed *handle, msg *message.Message, h message.HandlerFunc) ([]*message.Message, error) {
	msg.SetContext(oncemill.ContextWithTx(ctx, borrowed))
	defer msg.SetContext(ctx)
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

// claimFailed names a failure before the handler: whatever it is, the message has
// no part in it.
func claimFailed(err error) outcome {
	switch {
	case errors.Is(err, ErrBeingHandled):
		return beingHandled
	case sqlerr.Connection(err):
		return databaseAway
	}
	return databaseFailed
}

// commitFailed names a failure after the handler, which may be its doing: a
// deferred constraint, an ended transaction.
func commitFailed(err error) outcome {
	if sqlerr.Connection(err) {
		return databaseAway
	}
	return commitRefused
}
