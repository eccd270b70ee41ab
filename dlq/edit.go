package dlq

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/dlqstore"
	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Edit is what ReplayEdited delivers in place of the content of a message.
type Edit struct {
	Payload []byte // nil: that of the message

	// Metadata replaces all metadata of the message but the names that begin with
	// outbox.ReservedMetadata, which stay. nil: that of the message.
	Metadata message.Metadata
}

// Limits of an edit.
const (
	mostEditPayload = 16 << 20 // bytes
	mostEditEntries = 256      // of metadata
	mostEditEntry   = 16 << 10 // bytes of a name or a value
)

// ReplayEdited requests delivery of the message of a consumer's dead letter with other
// content, under the same message id. A reason is required. The dead letter keeps its
// message; the edit is kept beside it ([Letter].Edited), with who made it and why. If the
// edited message fails again, its new dead letter holds the edited content.
//
// Like a replay, it has one effect. The id then belongs to the edited content: a late copy
// of the message itself is a duplicate, or, for a consumer with inbox.Config.Fingerprint, a
// conflict.
//
// These cannot be edited, and give an [*EditError]: a relay's dead letter, since the broker
// may have the message, and consumers would not notice the difference; a message that
// package payload has encoded or signed, since nobody but the producer can do that; more
// than 16 MiB of payload; metadata that changes reserved names, or that is not valid UTF-8
// in one line. A message that another signature covers, checked by inbox.Config.Verify,
// becomes a dead letter with the reason unverified, and the replay stays open until it is
// discarded. The other errors are those of Discard.
func (s *Store) ReplayEdited(ctx context.Context, id int64, edit Edit, act Act) error {
	if err := act.check(true); err != nil {
		return err
	}
	letter, err := s.store.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("dlq: read dead letter %d: %w", id, err)
	}
	change, problem := edit.of(letter)
	switch {
	case letter.State != string(StateDead) && letter.Source == string(FromConsumer):
		return &StateError{ID: id, State: State(letter.State), Action: "edited"}
	case problem != "":
		return &EditError{ID: id, Problem: problem}
	}
	change.By, change.Reason = act.By, act.Reason
	_, err = s.act(ctx, func(ctx context.Context, ids []int64, _, _ string) ([]int64, error) {
		accepted, err := s.store.ReplayEdited(ctx, id, change)
		if !accepted {
			ids = nil
		}
		return ids, err
	}, "edited", []int64{id}, act)
	return err
}

// of returns the content that replaces that of a dead letter, or why there is none.
func (e Edit) of(letter *dlqstore.Letter) (change dlqstore.Edit, problem string) {
	switch {
	case letter.Source != string(FromConsumer):
		return change, "a relay wrote it; replay or discard it, and publish a new message"
	case letter.Metadata[payload.EncodingMetadata] != "" || letter.Metadata[payload.SignatureMetadata] != "":
		return change, "the message is encoded or signed; discard it, and publish a new message"
	case len(e.Payload) > mostEditPayload:
		return change, "the payload has more than " + strconv.Itoa(mostEditPayload) + " bytes"
	}
	change = dlqstore.Edit{Payload: letter.Payload, Metadata: letter.Metadata}
	if e.Payload != nil {
		change.Payload = e.Payload
	}
	if e.Metadata != nil {
		if change.Metadata, problem = editMetadata(letter.Metadata, e.Metadata); problem != "" {
			return change, problem
		}
	}
	return change, ""
}

// editMetadata returns the new metadata of a message: what is given, and the reserved names
// that it has.
func editMetadata(own map[string]string, given message.Metadata) (_ map[string]string, problem string) {
	if len(given) > mostEditEntries {
		return nil, "the metadata has more than " + strconv.Itoa(mostEditEntries) + " entries"
	}
	edited := map[string]string{}
	for name, value := range given {
		for _, s := range []string{name, value} {
			problem := text.Check(s, mostEditEntry)
			if problem == "" && strings.ContainsAny(s, "\r\n") {
				problem = "holds a line break"
			}
			if problem != "" {
				return nil, fmt.Sprintf("metadata %q: %q %s", text.Shorten(name), text.Shorten(s), problem)
			}
		}
		if had, ok := own[name]; reserved(name) && (!ok || had != value) {
			return nil, fmt.Sprintf("metadata %q is reserved", text.Shorten(name))
		}
		edited[name] = value
	}
	maps.Copy(edited, reservedOf(own))
	return edited, ""
}

func reserved(name string) bool {
	return strings.HasPrefix(strings.ToLower(name), outbox.ReservedMetadata)
}

func reservedOf(metadata map[string]string) map[string]string {
	kept := map[string]string{}
	for name, value := range metadata {
		if reserved(name) {
			kept[name] = value
		}
	}
	return kept
}
