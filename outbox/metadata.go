package outbox

import (
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/internal/text"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Metadata names that begin with ReservedMetadata belong to oncemill. A message may
// carry only these into Publish, and those of package payload (oncemill_encoding,
// oncemill_signature, oncemill_topic), which are passed on unchanged. Any other is
// refused with a [*MessageError], so that a typo does not become a header.
const (
	// ReservedMetadata is the prefix of reserved names.
	ReservedMetadata = "oncemill_"

	// KeyMetadata holds a message's ordering key, unless Config.Key is set; see
	// [SetKey]. Relays send the key to the broker under this name.
	KeyMetadata = ReservedMetadata + "key"

	// DeliverAtMetadata holds the time before which a message is not delivered, in RFC
	// 3339; see [SetDeliverAt]. It is not sent to the broker.
	DeliverAtMetadata = ReservedMetadata + "deliver_at"

	// DeliverAfterMetadata holds the delay after which a message is delivered, counted
	// from its publishing, in the notation of time.ParseDuration; see
	// [SetDeliverAfter]. It is not sent to the broker.
	DeliverAfterMetadata = ReservedMetadata + "deliver_after"

	// RowMetadata identifies the row of a message, as lane/id. Relays send it to the
	// broker. On a message that a consumer passes on it would identify the incoming
	// message, so Publish drops it.
	RowMetadata = ReservedMetadata + "id"

	// CreatedAtMetadata holds the time of the insert into the outbox, by the database's
	// clock, in RFC 3339. Sinks send it to the broker, and an inbox measures from it how
	// long the way from the transaction to the effect took. Publish drops it, as
	// RowMetadata. It does not begin with ReservedMetadata: a Publish from before there was
	// this name would refuse it on a message that a consumer passes on.
	CreatedAtMetadata = "oncemill-created-at"
)

// SetKey sets the ordering key of msg: messages of one key are delivered in order. An
// empty key removes the ordering key.
func SetKey(msg *message.Message, key string) { setMetadata(msg, KeyMetadata, key) }

// SetDeliverAt delays msg until t, by the database's clock. t must be between 1970 and
// 9999. A time in the past means now. The zero time removes the delay. It replaces what
// SetDeliverAfter has set.
//
// See "Later delivery" in the package documentation for the guarantees.
func SetDeliverAt(msg *message.Message, t time.Time) {
	at := ""
	if !t.IsZero() {
		at = t.UTC().Format(time.RFC3339Nano)
	}
	setMetadata(msg, DeliverAfterMetadata, "")
	setMetadata(msg, DeliverAtMetadata, at)
}

// SetDeliverAfter delays msg by d, counted by the database's clock from the statement
// that Publish sends. Zero removes the delay; Publish refuses a negative duration. It
// replaces what SetDeliverAt has set.
func SetDeliverAfter(msg *message.Message, d time.Duration) {
	after := ""
	if d != 0 {
		after = d.String()
	}
	setMetadata(msg, DeliverAtMetadata, "")
	setMetadata(msg, DeliverAfterMetadata, after)
}

// setMetadata sets an entry, or removes it if the value is empty.
func setMetadata(msg *message.Message, name, value string) {
	if value == "" {
		delete(msg.Metadata, name)
		return
	}
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
	msg.Metadata.Set(name, value)
}

// delay is when a message is due. The zero value means at once.
type delay struct {
	scheduled bool
	relative  bool  // to the database's clock, instead of to 1970
	micros    int64 // rounded up: a message is never early
}

// delayOf reads what SetDeliverAt and SetDeliverAfter have set. field names the entry
// with the problem.
func delayOf(metadata message.Metadata) (d delay, field, problem string) {
	at, after := metadata[DeliverAtMetadata], metadata[DeliverAfterMetadata]
	switch {
	case at == "" && after == "":
		return delay{}, "", ""
	case at != "" && after != "":
		return delay{}, "deliver_at", "and deliver_after are both set; set one (outbox.SetDeliverAt, outbox.SetDeliverAfter)"
	case at != "":
		t, err := time.Parse(time.RFC3339Nano, at)
		if err != nil || t.UTC().Year() < 1970 || t.UTC().Year() > 9999 {
			return delay{}, "deliver_at", fmt.Sprintf("is %q; it must be a time of RFC 3339 between 1970 and 9999", text.Shorten(at))
		}
		// Not t.UnixNano, which ends in 2262.
		return delay{scheduled: true, micros: t.Unix()*1e6 + int64(t.Nanosecond()+999)/1000}, "", ""
	}
	wait, err := time.ParseDuration(after)
	if err != nil || wait < 0 {
		return delay{}, "deliver_after", fmt.Sprintf("is %q; it must be a duration that is not negative", text.Shorten(after))
	}
	micros := wait.Microseconds()
	if wait%time.Microsecond > 0 {
		micros++
	}
	return delay{scheduled: wait > 0, relative: true, micros: micros}, "", ""
}

// passages holds for each reserved name whether its entry is passed on to the broker.
var passages = map[string]bool{
	KeyMetadata:               true,
	payload.EncodingMetadata:  true,
	payload.SignatureMetadata: true,
	payload.TopicMetadata:     true,
	DeliverAtMetadata:         false,
	DeliverAfterMetadata:      false,
	RowMetadata:               false,
}

// forBroker returns the metadata to store. It returns a copy if an entry has to be
// removed.
func forBroker(metadata message.Metadata) (kept message.Metadata, problem string) {
	var drop []string
	for name := range metadata {
		if !strings.HasPrefix(name, ReservedMetadata) {
			if name == CreatedAtMetadata {
				drop = append(drop, name)
			}
			continue
		}
		switch passed, known := passages[name]; {
		case !known:
			return nil, fmt.Sprintf("name %q begins with %s, which is reserved; see outbox.ReservedMetadata", text.Shorten(name), ReservedMetadata)
		case !passed:
			drop = append(drop, name)
		}
	}
	if len(drop) == 0 {
		return metadata, ""
	}
	kept = maps.Clone(metadata)
	for _, name := range drop {
		delete(kept, name)
	}
	return kept, ""
}
