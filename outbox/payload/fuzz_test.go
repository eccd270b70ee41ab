package payload_test

import (
	"errors"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// For any input, Decode returns a payload or one known reason. A codec that requires
// protection accepts only the messages of the golden file.
func FuzzCodec_Decode(f *testing.F) {
	store := &objects{all: map[string][]byte{}}
	genuine := map[string]bool{}
	text := func(msg *message.Message, topic string) string {
		return msg.UUID + "\n" + topic + "\n" + msg.Metadata.Get(payload.EncodingMetadata) + "\n" + msg.Metadata.Get(outbox.KeyMetadata) + "\n" + string(msg.Payload)
	}
	for _, g := range goldenMessages(f) {
		for name, body := range g.Objects {
			store.all[name] = body
		}
		genuine[text(g.encoded(), g.Topic)] = true
		f.Add(g.ID, g.Topic, g.Wire[payload.EncodingMetadata], g.Wire[payload.SignatureMetadata], g.Key, g.Wire["name"], g.Body)
	}
	f.Add("1", "t", "gzip", "", "", "", compressed(f, make([]byte, 5000), nil))
	open := goldenConfig(store)
	open.MaxSize = 4096
	encrypted, signed := open, open
	encrypted.RequireEncryption, signed.RequireSignature = true, true
	f.Fuzz(func(t *testing.T, id, topic, encoding, signature, key, name string, body []byte) {
		msg := &message.Message{UUID: id, Payload: body, Metadata: message.Metadata{
			payload.EncodingMetadata: encoding, payload.SignatureMetadata: signature, payload.TopicMetadata: topic, outbox.KeyMetadata: key, "name": name,
		}}
		for _, cfg := range []payload.Config{open, encrypted, signed} {
			before := msg.Copy()
			plain, err := newCodec(t, cfg).Decode(t.Context(), topic, msg)
			var bad *payload.DecodeError
			switch {
			case !msg.Equals(before):
				t.Error("the message was changed")
			case err != nil && (!errors.As(err, &bad) || plain != nil || len(err.Error()) > 1000):
				t.Errorf("got %v, %v", plain, err)
			case err == nil && encoding != "" && len(plain.Payload) > open.MaxSize:
				t.Errorf("got %d bytes", len(plain.Payload))
			case err == nil && (cfg.RequireEncryption || cfg.RequireSignature) && !genuine[text(msg, topic)]:
				t.Errorf("accepted %q %v", id, msg.Metadata)
			}
		}
	})
}
