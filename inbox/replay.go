package inbox

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/dlq"
	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/sqlerr"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
)

// A replay is the message of a dead letter, delivered again. This file holds what is
// special about it: how it is marked, when the mark is trusted, which id it has, and how it
// ends. An operator has asked for it, so neither its age nor its position in a sequence
// matters.

// Metadata of a replay. A broker's header of the same name becomes metadata. Anybody can
// set it; [Inbox.verifyReplay] decides whether it is trusted.
const (
	ReplayMetadata   = outbox.ReservedMetadata + "replay"   // id of the dead letter
	TokenMetadata    = outbox.ReservedMetadata + "token"    // its secret
	ConsumerMetadata = outbox.ReservedMetadata + "consumer" // its consumer, for people who look at queues
)

// uuidMetadata is, in a dead letter, the UUID of a message whose id is not its UUID.
const uuidMetadata = outbox.ReservedMetadata + "uuid"

var replayMetadata = []string{ReplayMetadata, TokenMetadata, ConsumerMetadata, uuidMetadata}

// replayOf recreates the message of a dead letter.
func replayOf(ctx context.Context, letter *dlq.Letter, token string) *message.Message {
	metadata := message.Metadata{}
	payload := letter.Payload
	if edit := letter.Edited; edit != nil && edit.InUse {
		payload = edit.Payload
		maps.Copy(metadata, edit.Metadata)
	} else {
		maps.Copy(metadata, letter.Metadata)
	}
	delete(metadata, outbox.RowMetadata)
	delete(metadata, uuidMetadata)
	metadata.Set(ConsumerMetadata, letter.Consumer)
	metadata.Set(ReplayMetadata, strconv.FormatInt(letter.ID, 10))
	metadata.Set(TokenMetadata, token)
	msg := message.NewMessageWithContext(ctx, uuidOf(letter.Metadata, letter.MessageID), payload)
	msg.Metadata = metadata
	return msg
}

// uuidOf returns the UUID of the message of a dead letter; empty if it had none.
func uuidOf(metadata map[string]string, messageID string) string {
	return cmp.Or(metadata[uuidMetadata], messageID)
}

// takesID reports whether a dead letter takes the id of its message, which requires that
// the id belongs to no other message. A refused message may have been made by anybody,
// with the id of another. No signature covers a message's age, so a copy that somebody has
// made look old takes nothing from the message itself.
func takesID(letter *dlqstore.Letter) bool {
	reason := Reason(letter.Reason)
	return letter.MessageID != "" && reason != ReasonConflict && reason != ReasonTooOld && !reason.refused()
}

// replayMark names the dead letter that a message claims to replay.
type replayMark struct {
	letter int64 // 0 if unreadable
	token  string
}

// takeMark removes the replay metadata from a message until restore is called, and returns
// what it claims: nil without such metadata. So it gets into no dead letter of the message,
// and into no message that a handler makes from the metadata.
func takeMark(msg *message.Message) (claimed *replayMark, restore func()) {
	marked := msg.Metadata
	if !slices.ContainsFunc(replayMetadata, func(name string) bool { _, has := marked[name]; return has }) {
		return nil, func() {}
	}
	msg.Metadata = maps.Clone(marked)
	for _, name := range replayMetadata {
		delete(msg.Metadata, name)
	}
	claimed = &replayMark{token: marked[TokenMetadata]}
	if letter, err := strconv.ParseInt(marked[ReplayMetadata], 10, 64); err == nil {
		claimed.letter = letter
	}
	return claimed, func() { msg.Metadata = marked }
}

// replay is a verified mark.
type replay struct {
	replayMark
	dead bool // the dead letter holds the id
}

// verifyReplay finds out whether a message that has passed all checks is the replay of the
// dead letter that it names. If so, it sets w.replay, and the letter's id is the message's
// id from now on. The transaction that takes the id checks the letter again and ends its
// replay: only its state can have changed. done means that nothing is left to do: the
// replay has ended, was discarded, or is for another consumer. Then the content does not
// matter: an edit is forgotten when its replay is discarded.
func (in *Inbox) verifyReplay(ctx context.Context, w *work, claimed replayMark) (done bool, err error) {
	if in.letters == nil || claimed.letter == 0 || claimed.token == "" || text.Check(claimed.token, maxID) != "" {
		in.logForgedReplay(ctx, w)
		return false, nil
	}
	letter, former, err := in.letterOfReplay(ctx, claimed)
	switch {
	case errors.Is(err, dlqstore.ErrNotFound):
		in.logForgedReplay(ctx, w)
	case err != nil:
		return false, fmt.Errorf("check replay: %w", err)
	case w.msg.UUID != uuidOf(letter.Metadata, letter.MessageID):
		in.logForgedReplay(ctx, w)
	case letter.Consumer != in.cfg.Consumer:
		in.telemetry.record(ctx, w, outcomeIgnored)
		return true, nil
	case former, letter.State != string(dlq.StateReplaying): // a late copy
		in.telemetry.record(ctx, w, outcomeDuplicate)
		in.logDuplicate(ctx, letter.MessageID)
		return true, nil
	case !delivers(letter, w.came().payload):
		in.logForgedReplay(ctx, w)
	default:
		w.replay, w.id = &replay{claimed, takesID(letter)}, letter.ReplayID()
	}
	return false, nil
}

// delivers reports whether a replay of a dead letter has this payload.
func delivers(letter *dlqstore.Letter, payload []byte) bool {
	own, _ := letter.Delivered()
	return bytes.Equal(payload, own)
}

// letterOfReplay returns the dead letter that has, or had before its last replay, the token
// of a mark.
func (in *Inbox) letterOfReplay(ctx context.Context, claimed replayMark) (letter *dlqstore.Letter, former bool, err error) {
	letter, err = ask(ctx, in, func(ctx context.Context) (*dlqstore.Letter, error) {
		return in.letters.CheckReplay(ctx, claimed.letter, claimed.token)
	})
	if !errors.Is(err, dlqstore.ErrNotFound) {
		return letter, false, err
	}
	letter, err = ask(ctx, in, func(ctx context.Context) (*dlqstore.Letter, error) {
		return in.letters.FormerReplay(ctx, claimed.letter, claimed.token)
	})
	return letter, true, err
}

func (in *Inbox) logForgedReplay(ctx context.Context, w *work) {
	in.forgedReplays.do(func(more int) {
		in.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "not a replay of ours; handling it as any message",
			slog.String("consumer", in.cfg.Consumer), slog.String("topic", in.topicOf(ctx)),
			slog.String("message_id", text.Shorten(w.msg.UUID)), slog.Int("more", more))
	})
}

// takeReplay ends, with tx, the replay that w is, and frees the id for the claim that
// follows if the dead letter has taken it.
func (in *Inbox) takeReplay(ctx context.Context, tx *sql.Tx, id string, w *work) error {
	if err := in.endReplay(ctx, tx, w); err != nil || !w.replay.dead {
		return err
	}
	return in.store.Reopen(ctx, tx, id)
}

// endReplay ends, with tx, the replay that w is. It is the first statement that looks at
// more than the id: copies wait here for each other. All but one find that the replay has
// ended, which is an outcome of its own: the next delivery is a late copy.
func (in *Inbox) endReplay(ctx context.Context, tx *sql.Tx, w *work) error {
	if err := in.store.LimitLockWait(ctx, tx); err != nil {
		return err
	}
	ended, err := in.letters.EndReplay(ctx, tx, in.cfg.Consumer, w.replay.letter, w.replay.token, w.came().payload)
	switch {
	case sqlerr.Contended(err):
		return fmt.Errorf("%w: %w", ErrBeingHandled, err)
	case err != nil:
		return fmt.Errorf("end replay: %w", err)
	case !ended:
		return fmt.Errorf("%w: its replay has just ended", ErrBeingHandled)
	}
	return nil
}
