package inbox

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/nopanic"
)

// Reason is the class of a dead letter, its dlq.Letter.Reason.
type Reason string

// The reasons of dead letters.
const (
	ReasonFailed      Reason = "failed"               // Retry.Deliveries deliveries have failed
	ReasonPermanent   Reason = "permanent"            // the error was marked by Permanent
	ReasonUnavailable Reason = "unavailable"          // in Retry.Unavailable deliveries something was unavailable, but not to other messages
	ReasonCrashed     Reason = "crashed"              // it crashed its process Retry.Crashes times
	ReasonNoMessageID Reason = "no-message-id"        // or an id that cannot be stored
	ReasonConflict    Reason = "conflict"             // same id, other fingerprint
	ReasonUnverified  Reason = "unverified"           // Config.Verify or Config.Payload refused it
	ReasonTooOld      Reason = "older-than-retention" // its id may have been purged
	ReasonMalformed   Reason = "malformed"            // the subscriber or Config.Payload could not read it
)

// refused reports whether anybody may have made the message. Such a message is known by no
// id, and only a limited number become dead letters (Config.KeepRefused).
func (r Reason) refused() bool { return r == ReasonUnverified || r == ReasonMalformed }

// Refuse makes a dead letter of a message that cannot be passed to a handler, with
// ReasonMalformed. It needs Config.DeadLetters and fits the Malformed hook of
// inbox/rabbitmq. Nothing is deduplicated: each call makes a dead letter, up to
// Config.KeepRefused. It ends no replay: the replay of a message that again cannot be read
// stays open.
func (in *Inbox) Refuse(ctx context.Context, msg *message.Message, reason error) error {
	if in.cfg.DeadLetters == nil {
		return ErrNoDeadLetters
	}
	w := &work{msg: msg, uuid: msg.UUID}
	_, restore := takeMark(msg)
	defer restore()
	return in.refuse(ctx, w, ReasonMalformed, reason)
}

func (in *Inbox) newLetter(ctx context.Context, w *work, id string, reason Reason, err error) *dlqstore.Letter {
	came := w.came()
	letter := &dlqstore.Letter{
		Consumer:  in.cfg.Consumer,
		Topic:     in.topicOf(ctx),
		MessageID: id,
		Key:       in.keyOf(w.msg),
		Payload:   came.payload,
		Metadata:  came.metadata,
		Reason:    string(reason),
		Error:     textOf(in.textOf(err)),
		Tries:     1,
	}
	if d, ok := DeliveryFromContext(ctx); ok {
		letter.CreatedAt = d.CreatedAt()
	}
	if w.uuid != "" && w.uuid != id {
		letter.Metadata = maps.Clone(letter.Metadata)
		if letter.Metadata == nil {
			letter.Metadata = map[string]string{}
		}
		letter.Metadata[uuidMetadata] = w.uuid
	}
	letter.Stack = textOf(nopanic.Stack(err))
	return letter
}

// keyOf is the key of a message. The message may make the key function panic.
func (in *Inbox) keyOf(msg *message.Message) (key string) {
	_ = nopanic.Call(func() error { key = in.cfg.Key(msg); return nil })
	return key
}

// writeDeadLetter commits a dead letter. With a message id, it claims the id and removes the
// failure records of the message. If the id is claimed already, no dead letter is written. If
// the id may belong to another or a handled message, the dead letter claims an id of its own,
// so that copies create no further dead letters.
func (in *Inbox) writeDeadLetter(ctx context.Context, letter *dlqstore.Letter, w *work) (added bool, err error) {
	limited, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	tx, err := in.store.Begin(limited, in.calls)
	if err != nil {
		return false, fmt.Errorf("dead letter: begin: %w", err)
	}
	defer tx.Rollback() // as in alone
	added, err = within(limited, tx, func(ctx context.Context, tx *sql.Tx) (bool, error) { return in.deadLetterIn(ctx, tx, letter, w) })
	if err == nil && (added || w.replay != nil) {
		_, err = in.commit(tx)
	}
	if err != nil {
		return false, fmt.Errorf("dead letter: %w", err)
	}
	return added, nil
}

// deadLetterIn reports whether a dead letter was written. If not, a replay has ended.
func (in *Inbox) deadLetterIn(ctx context.Context, tx *sql.Tx, letter *dlqstore.Letter, w *work) (bool, error) {
	id := letter.MessageID
	taken := takesID(letter)
	switch {
	case taken:
		dead := *w
		dead.fingerprint = nil // fingerprints are of handled messages
		claimed, err := in.claimIn(ctx, tx, id, &dead)
		if err != nil || !claimed {
			return false, err
		}
		if err := errors.Join(in.store.MarkDead(ctx, tx, id), in.store.DeleteFailures(ctx, tx, id)); err != nil {
			return false, err
		}
	case w.replay != nil:
		if err := in.endReplay(ctx, tx, w); err != nil {
			return false, err
		}
	case letter.MessageID != "":
		id = ownID(letter, w.fingerprint)
		taken = true
		if claimed, err := in.store.Claim(ctx, tx, id, nil); err != nil || !claimed {
			return false, err
		}
	}
	if err := in.letters.Add(ctx, tx, letter); err != nil {
		return false, fmt.Errorf("add: %w", err)
	}
	if taken {
		if err := in.store.Seal(ctx, tx, id); err != nil {
			return false, err
		}
	}
	return true, nil
}

// ownID returns an id for the dead letter, the same for all copies of a message.
func ownID(letter *dlqstore.Letter, fingerprint []byte) string {
	hash := sha256.New()
	fmt.Fprintf(hash, "%d %s%d %s", len(letter.MessageID), letter.MessageID, len(fingerprint), fingerprint)
	hash.Write(letter.Payload)
	return letter.Reason + " " + hex.EncodeToString(hash.Sum(nil))
}

// textOf makes s acceptable as text to any database.
func textOf(s string) string {
	const most = 16 << 10
	if len(s) > most {
		s = s[:most]
	}
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", "\uFFFD"), "\uFFFD")
}
