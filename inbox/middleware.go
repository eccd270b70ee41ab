package inbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/bounded"
	"github.com/oncemill/oncemill/internal/boundtx"
	"github.com/oncemill/oncemill/internal/crashpoint"
	"github.com/oncemill/oncemill/internal/nopanic"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/txhandle"
)

// Middleware is a Watermill message.HandlerMiddleware. It runs h in a transaction that
// also contains the id of the message and the messages that h returns. It reports success
// once that has committed; then the router acknowledges. A copy of a message that was
// handled before is reported as success without running h. After an error, or a panic
// (reported as a [*oncemill.PanicError]), nothing of the attempt is left. If h ends its
// goroutine (runtime.Goexit), the message is nacked.
//
// Add it last, so that it is next to the handler: a middleware that retries or limits the
// time belongs outside the transaction. Each attempt gets a copy of the message: to have it
// delivered again, h returns an error. Ack and Nack of the copy have no effect.
func (in *Inbox) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return in.middleware(h, in.alone)
}

// alone makes an attempt in a transaction of its own.
func (in *Inbox) alone(unlimited context.Context, w *work) (outcome, error) {
	ctx, cancel := context.WithTimeout(unlimited, in.cfg.Timeout)
	defer cancel()
	id, began := w.id, time.Now()
	tx, err := in.store.Begin(ctx, in.calls)
	if err != nil {
		return claimFailed(unlimited, err), fmt.Errorf("begin: %w", err)
	}
	// A no-op after the commit. Otherwise it frees the connection, also when the handler
	// ends its goroutine.
	defer tx.Rollback()
	claimed, err := in.claim(ctx, tx, id, w)
	if err != nil {
		return claimFailed(unlimited, err), err
	}
	if !claimed {
		return in.duplicate(ctx, tx, w)
	}
	if err := in.readFailed(unlimited, tx, w); err != nil {
		return claimFailed(unlimited, err), err
	}
	waited := time.Since(began)
	if err = in.effect(ctx, tx, tx.Raw, w, nil); err == nil && ctx.Err() != nil {
		err = fmt.Errorf("the handler exceeded its time: %w", ctx.Err())
	}
	if err != nil {
		if ctx.Err() != nil && unlimited.Err() == nil && waited > in.cfg.Timeout/2 {
			return outcomeDatabaseFailed, err // the handler was not given its time
		}
		if tx.Unanswered(err) {
			return outcomeDatabaseDown, errors.Join(err, bounded.ErrAbandoned)
		}
		if in.gone(ctx, tx) {
			return outcomeDatabaseDown, err
		}
		return outcomeHandlerFailed, err
	}
	if w.start.Recorded {
		if _, err := within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (struct{}, error) {
			return struct{}{}, in.store.DeleteFailures(ctx, tx, id)
		}); err != nil {
			if sqlerr.TxAborted(err) { // by the handler, as the seal would find
				return outcomeCommitRefused, sqlerr.OfSeal(err)
			}
			return claimFailed(ctx, err), fmt.Errorf("delete failures: %w", err)
		}
	}
	if _, err := within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (struct{}, error) {
		return struct{}{}, in.store.Seal(ctx, tx, id)
	}); err != nil {
		return commitFailed(err), err
	}
	return in.commit(tx)
}

// gone reports whether the connection of tx is lost, or does not answer. Once the time of
// the attempt is over, the transaction has been rolled back, which may close the connection.
func (in *Inbox) gone(ctx context.Context, tx *boundtx.Tx) bool {
	if ctx.Err() != nil {
		return false
	}
	gone, err := within(context.WithoutCancel(ctx), tx, func(ctx context.Context, tx *sql.Tx) (bool, error) {
		return in.store.ConnectionLost(ctx, tx), nil
	})
	return gone || err != nil
}

// claim takes the id. Only the replay of a dead letter can take the dead letter's id; that
// ends the replay.
func (in *Inbox) claim(ctx context.Context, tx *boundtx.Tx, id string, w *work) (bool, error) {
	return boundtx.Do(ctx, tx, in.cfg.LockTimeout+callLimit, func(ctx context.Context) (bool, error) {
		return in.claimIn(ctx, tx.Raw, id, w)
	})
}

func (in *Inbox) claimIn(ctx context.Context, tx *sql.Tx, id string, w *work) (bool, error) {
	if w.replay != nil {
		if err := in.takeReplay(ctx, tx, id, w); err != nil {
			return false, err
		}
	}
	return in.store.Claim(ctx, tx, id, w.fingerprint)
}

// duplicate handles an id that a committed transaction has claimed.
func (in *Inbox) duplicate(ctx context.Context, tx *boundtx.Tx, w *work) (outcome, error) {
	if w.fingerprint != nil {
		id, fingerprint := w.id, w.fingerprint
		same, err := within(ctx, tx, func(ctx context.Context, tx *sql.Tx) (bool, error) {
			return in.store.SameFingerprint(ctx, tx, id, fingerprint)
		})
		if err != nil {
			return claimFailed(ctx, err), fmt.Errorf("compare fingerprints: %w", err)
		}
		if !same {
			return outcomeConflict, ErrConflict
		}
	}
	if w.replay != nil { // its message has been handled
		if result, err := in.commit(tx); err != nil {
			return result, fmt.Errorf("end replay: %w", err)
		}
	}
	if w.start.Recorded {
		tx.Rollback() // before the next step: on SQLite an open writer would block it
		in.recordEnd(ctx, w)
	}
	in.logDuplicate(ctx, w.id)
	return outcomeDuplicate, nil
}

func (in *Inbox) logDuplicate(ctx context.Context, id string) {
	in.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "duplicate acknowledged",
		slog.String("consumer", in.cfg.Consumer), slog.String("message_id", id), slog.String("topic", in.topicOf(ctx)))
}

// effect runs the handler in tx, through statements, and writes the returned messages to
// the outbox. It calls functions of Config on the way, so it recovers panics as a whole.
// If shared is not nil, it refuses changes of settings with shared.
func (in *Inbox) effect(ctx context.Context, tx *boundtx.Tx, statements txhandle.Statements, w *work, shared error) error {
	return nopanic.Call(func() error { return in.run(ctx, tx, statements, w, shared) })
}

func (in *Inbox) run(ctx context.Context, tx *boundtx.Tx, statements txhandle.Statements, w *work, shared error) error {
	admitted, err := in.admit(ctx, tx, w)
	if err != nil || !admitted {
		return err
	}
	h := in.newHandle(w.id, tx, statements)
	h.msg, h.attempt = w.msg, in.attemptOf(w)
	h.Share(shared)
	// Also when the handler ends its goroutine.
	defer h.Close(ErrTxEnded) //nolint:errcheck // its reason was asked for, or nobody is there to hear it
	crashpoint.Reach(crashpoint.AfterClaim)
	produced, err := w.handler(forHandler(ctx, h, w.msg))
	crashpoint.Reach(crashpoint.AfterEffect)
	if err == nil && len(produced) > 0 {
		if err = ctx.Err(); err == nil { // else nobody may wait any more, and w may be another's
			err = in.publish(ctx, h, w, produced)
		}
	}
	if reason := h.Close(ErrTxEnded); err == nil && reason != nil {
		// The handler has ignored the error that its statement returned.
		err = reason
	}
	return err
}

// commit waits for the answer even if the context of the message ends meanwhile.
func (in *Inbox) commit(tx *boundtx.Tx) (outcome, error) {
	switch err := tx.Commit(boundtx.CommitLimit); {
	case err == nil:
	case errors.Is(err, boundtx.ErrUnknown):
		return outcomeCommitUnknown, fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	case errors.Is(err, context.Canceled), noAnswer(err): // it was not sent
		return outcomeDatabaseFailed, err
	default:
		return commitFailed(err), err
	}
	if in.cfg.Outbox != nil {
		in.cfg.Outbox.Wake()
	}
	return outcomeHandled, nil
}

// forHandler returns what an attempt passes to the handler: a copy of the message, with the
// transaction in its context. What the handler does to it, acknowledging it included,
// reaches neither the next attempt nor the dead letter nor the broker.
func forHandler(ctx context.Context, h *handle, msg *message.Message) *message.Message {
	own := msg.Copy()
	own.SetContext(oncemill.ContextWithTx(ctx, h))
	return own
}

func (in *Inbox) publish(ctx context.Context, h *handle, w *work, produced []*message.Message) error {
	if in.cfg.Outbox == nil {
		return ErrNoOutbox
	}
	topic := message.PublishTopicFromCtx(ctx)
	if topic == "" {
		return ErrNoTopic
	}
	return in.cfg.Outbox.Publish(ctx, h, topic, in.tracing.continued(w, produced)...) //nolint:contextcheck // compares traces, and needs no context
}

// claimFailed classifies a failure before the handler, which is never the message's fault.
// ctx is the context of the message.
func claimFailed(ctx context.Context, err error) outcome {
	switch {
	case ctx.Err() != nil:
		return outcomeWaiting
	case errors.Is(err, ErrBeingHandled):
		return outcomeBeingHandled
	case sqlerr.Connection(err), noAnswer(err):
		return outcomeDatabaseDown
	}
	return outcomeDatabaseFailed
}

// commitFailed classifies a failure after the handler, which the handler may have caused:
// a deferred constraint, an ended transaction.
func commitFailed(err error) outcome {
	if sqlerr.Connection(err) {
		return outcomeDatabaseDown
	}
	return outcomeCommitRefused
}
