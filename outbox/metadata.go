package outbox

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/outbox/payload"
)

// Names of metadata that begin with ReservedMetadata belong to oncemill. These are
// all that a message may carry into Publish, besides those of package payload
// (oncemill_encoding, oncemill_signature, oncemill_topic), which are passed on as
// they are; any other is refused with a [*MessageError], so that a slip of the pen
// does not become a header.
const (
	// ReservedMetadata is the prefix.
	ReservedMetadata = "oncemill_"

	// KeyMetadata holds a message's ordering key, unless Config.Key says
	// otherwise; see [SetKey]. Relays write the key under this name to the
	// broker.
	KeyMetadata = ReservedMetadata + "key"

	// DeliverAtMetadata holds the time before which a message is not
	// delivered, as in RFC 3339; see [SetDeliverAt]. It does not leave the
	// database.
	DeliverAtMetadata = ReservedMetadata + "deliver_at"

	// DeliverAfterMetadata holds how long after its publishing a message is
	// delivered, in the notation of time.ParseDuration; see
	// [SetDeliverAfter]. It does not leave the database.
	DeliverAfterMetadata = ReservedMetadata + "deliver_after"

	// RowMetadata names the row that a message came from, lane/id. Relays write
	// it to the broker. On a message that a consumer passes on it tells of the
	// one that came in, so Publish drops it.
	RowMetadata = ReservedMetadata + "id"
)

// SetKey sets the ordering key of msg: messages of one key are delivered in
// order. The empty key takes the order away.
func SetKey(msg *message.Message, key string) { setMetadata(msg, KeyMetadata, key) }

// SetDeliverAt keeps msg back until t, a time between 1970 and 9999, by the
// database's clock. A time that has passed is as good as now. The zero time takes
// it back. It replaces what SetDeliverAfter has set.
//
// See "Later delivery" in the package's documentation for what is promised.
func SetDeliverAt(msg *message.Message, t time.Time) {
	text := ""
	if !t.IsZero() {
		text = t.UTC().Format(time.RFC3339Nano)
	}
	setMetadata(msg, DeliverAfterMetadata, "")
	setMetadata(msg, DeliverAtMetadata, text)
}

// SetDeliverAfter keeps msg back for d, counted by the database's clock from the
// statement that Publish sends. Zero takes it back; a negative duration is refused
// by Publish. It replaces what SetDeliverAt has set.
func SetDeliverAfter(msg *message.Message, d time.Duration) {
	text := ""
	if d != 0 {
		text = d.String()
	}
	setMetadata(msg, DeliverAtMetadata, "")
	setMetadata(msg, DeliverAfterMetadata, text)
}

// setMetadata sets an entry, or removes it for the empty value.
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

// delay says when a message is due. The zero value: at once.
type delay struct {
	scheduled bool
	relative  bool  // to the database's clock, instead of to 1970
	micros    int64 // rounded up: a message is never early
}

// delayOf reads what SetDeliverAt and SetDeliverAfter have set. The field is the
// one that is wrong.
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
			return delay{}, "deliver_at", fmt.Sprintf("is %q; it must be a time of RFC 3339 between 1970 and 9999", shorten(at))
		}
		// The time's own nanoseconds: UnixNano ends in 2262.
		return delay{scheduled: true, micros: t.Unix()*1e6 + int64(t.Nanosecond()+999)/1000}, "", ""
	}
	wait, err := time.ParseDuration(after)
	if err != nil || wait < 0 {
		return delay{}, "deliver_after", fmt.Sprintf("is %q; it must be a duration that is not negative", shorten(after))
	}
	micros := wait.Microseconds()
	if wait%time.Microsecond > 0 {
		micros++
	}
	return delay{scheduled: wait > 0, relative: true, micros: micros}, "", ""
}

// passages tells of each reserved name whether its entry is passed on to the
// broker, or concerns only the way here.
var passages = map[string]bool{
	KeyMetadata:               true,
	payload.EncodingMetadata:  true,
	payload.SignatureMetadata: true,
	payload.TopicMetadata:     true,
	DeliverAtMetadata:         false,
	DeliverAfterMetadata:      false,
	RowMetadata:               false,
}

// forBroker returns the metadata that is to be stored. It returns a copy where
// anything has to go.
func forBroker(metadata message.Metadata) (kept message.Metadata, problem string) {
	var drop []string
	for name := range metadata {
		if !strings.HasPrefix(name, ReservedMetadata) {
			continue
		}
		switch passed, known := passages[name]; {
		case !known:
			return nil, fmt.Sprintf("name %q begins with %s, which is reserved; see outbox.ReservedMetadata", shorten(name), ReservedMetadata)
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

// traceOf returns the context whose trace a message goes on with: its own, if that has
// a span, or that of the call.
func traceOf(ctx context.Context, msg *message.Message) context.Context {
	if trace.SpanContextFromContext(msg.Context()).IsValid() {
		return msg.Context()
	}
	return ctx
}

// traced returns metadata with the trace of ctx, unless it has one.
func traced(ctx context.Context, propagator propagation.TextMapPropagator, metadata message.Metadata) message.Metadata {
	fields := propagator.Fields()
	if len(fields) == 0 || metadata[fields[0]] != "" {
		return metadata
	}
	carrier := propagation.MapCarrier{}
	propagator.Inject(ctx, carrier)
	if len(carrier) == 0 {
		return metadata
	}
	if metadata = maps.Clone(metadata); metadata == nil {
		metadata = message.Metadata{}
	}
	maps.Copy(metadata, carrier)
	return metadata
}
