package payload_test

import (
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// guards are configurations that each must detect every change of what they cover.
func guards(store payload.Store) map[string]payload.Config {
	signed := payload.Config{Signature: keys("sig-1"), RequireSignature: true, SignedMetadata: []string{"name"}}
	signedAndClaimed := signed
	signedAndClaimed.Store, signedAndClaimed.StoreFrom, signedAndClaimed.CompressFrom = store, 1, 1
	encrypted := payload.Config{Encryption: keys("enc-1"), RequireEncryption: true}
	encryptedAndClaimed := encrypted
	encryptedAndClaimed.Store, encryptedAndClaimed.StoreFrom, encryptedAndClaimed.CompressFrom = store, 1, 1
	return map[string]payload.Config{
		"signed": signed, "signed and claimed": signedAndClaimed,
		"encrypted": encrypted, "encrypted and claimed": encryptedAndClaimed, "everything": everything(store),
	}
}

// changes calls try with every string that differs from s in one bit, and with
// shorter and longer ones.
func changes(s string, try func(changed string)) {
	bytes := []byte(s)
	for i := range bytes {
		for bit := range 8 {
			bytes[i] ^= 1 << bit
			try(string(bytes))
			bytes[i] ^= 1 << bit
		}
		try(s[:i])
		try(s[:i] + s[i+1:])
		try(s[:i] + s[i:i+1] + s[i:])
	}
	for _, more := range []string{"\x00", " ", ",", ";", ",gzip", ",claim:", ",aes-256-gcm:enc-1"} {
		try(s + more)
		try(strings.TrimPrefix(more, ",") + s)
	}
	for _, step := range []string{"gzip,", ",gzip", ",aes-256-gcm:enc-1"} {
		try(strings.Replace(s, step, "", 1))
		try(step + s)
	}
}

func TestDecode_NoticesEveryChange(t *testing.T) {
	t.Parallel()
	store := &objects{}
	for name, cfg := range guards(store) {
		t.Run(name, func(t *testing.T) {
			codec := newCodec(t, cfg)
			encoded := encode(t, codec, order("order-1"))
			tried := 0
			try := func(what string, change func(*message.Message)) {
				changed := encoded.Copy()
				change(changed)
				if changed.Equals(encoded) {
					return // bits of nothing
				}
				tried++
				refusedSomehow(t, codec, changed, what)
			}
			for header := range encoded.Metadata {
				if header == "name" && cfg.SignedMetadata == nil {
					continue // covered only where said
				}
				try("without "+header, func(msg *message.Message) { delete(msg.Metadata, header) })
				changes(encoded.Metadata[header], func(changed string) {
					try(fmt.Sprintf("%s: %q", header, changed), func(msg *message.Message) { msg.Metadata[header] = changed })
				})
			}
			changes(string(encoded.Payload), func(changed string) {
				try("payload", func(msg *message.Message) { msg.Payload = []byte(changed) })
			})
			changes(encoded.UUID, func(changed string) {
				try("id", func(msg *message.Message) { msg.UUID = changed })
			})
			if tried < 1000 {
				t.Errorf("tried %d changes", tried)
			}
			expectEqual(t, decode(t, codec, encoded), order("order-1"))

			if cfg.Store == nil {
				return
			}
			changes(string(store.all[claimed(t, encoded)]), func(changed string) {
				cfg := cfg
				cfg.Store = store.replaced(func([]byte) []byte { return []byte(changed) })
				if changed != string(store.all[claimed(t, encoded)]) {
					refused(t, newCodec(t, cfg), encoded, payload.ErrClaim)
				}
			})
		})
	}
}

// claimed returns the name of the object that encoded refers to.
func claimed(t testing.TB, encoded *message.Message) string {
	t.Helper()
	_, reference, ok := strings.Cut(encoded.Metadata.Get(payload.EncodingMetadata), "claim:")
	if !ok {
		t.Fatalf("nothing is claimed: %v", encoded.Metadata)
	}
	name, _, _ := strings.Cut(reference, ":")
	return name
}

// Parts of one message are refused in another message.
func TestDecode_RefusesWhatBelongsToAnotherMessage(t *testing.T) {
	t.Parallel()
	store := &objects{}
	for name, cfg := range guards(store) {
		t.Run(name, func(t *testing.T) {
			codec := newCodec(t, cfg)
			encoded := encode(t, codec, order("order-1"))
			refusedSomehow(t, codec, renamed(encoded, "order-2"), "under another id")

			toOther, err := codec.Encode(t.Context(), "refunds", "customer-7", order("order-1"))
			if err != nil {
				t.Fatal(err)
			}
			refused(t, codec, toOther, payload.ErrTopic)
			toOther.Metadata[payload.TopicMetadata] = "orders"
			refusedSomehow(t, codec, toOther, "under another topic")

			otherKey := encoded.Copy()
			outbox.SetKey(otherKey, "customer-8")
			refusedSomehow(t, codec, otherKey, "under another key")
			unkeyed := encoded.Copy()
			outbox.SetKey(unkeyed, "")
			refusedSomehow(t, codec, unkeyed, "without its key")

			// Each part replaced by that of another message.
			other := order("order-2")
			other.Payload = append(other.Payload, "and more"...)
			outbox.SetKey(other, "customer-9")
			other.Metadata.Set("name", "OrderCancelled")
			foreign := encode(t, codec, other)
			parts := slices.Sorted(maps.Keys(foreign.Metadata))
			for mix := 1; mix < 1<<len(parts)-1; mix++ {
				for _, body := range []message.Payload{encoded.Payload, foreign.Payload} {
					mixed := encoded.Copy()
					mixed.Payload = body
					covered := false
					for i, part := range parts {
						if mix>>i&1 == 1 && encoded.Metadata[part] != foreign.Metadata[part] {
							mixed.Metadata[part] = foreign.Metadata[part]
							covered = covered || part != "name" || cfg.SignedMetadata != nil
						}
					}
					if covered {
						refusedSomehow(t, codec, mixed, fmt.Sprintf("with parts %b of another", mix))
					}
				}
			}
			expectEqual(t, decode(t, codec, encoded), order("order-1"))
			expectEqual(t, decode(t, codec, foreign), other)
		})
	}
}

func renamed(msg *message.Message, id string) *message.Message {
	out := message.NewMessage(id, msg.Payload)
	maps.Copy(out.Metadata, msg.Metadata)
	return out
}

// An attacker who can write to the broker removes the protection of a message and sends
// another payload.
func TestDecode_RefusesDowngrades(t *testing.T) {
	t.Parallel()
	store := &objects{}
	codec := newCodec(t, everything(store))
	onlyEncrypted, onlySigned := everything(store), everything(store)
	onlyEncrypted.RequireSignature, onlySigned.RequireEncryption = false, false
	forged := order("order-1")
	forged.Payload = []byte(`{"item":"gold","pieces":3}`)

	refused(t, codec, forged, payload.ErrUnsigned)
	refused(t, newCodec(t, onlySigned), forged, payload.ErrUnsigned)
	refused(t, newCodec(t, onlyEncrypted), forged, payload.ErrUnencrypted)

	encoded := encode(t, codec, order("order-1"))
	for name, change := range map[string]func(*message.Message){
		"all of it":     func(msg *message.Message) { msg.Metadata = forged.Metadata },
		"the signature": func(msg *message.Message) { delete(msg.Metadata, payload.SignatureMetadata) },
		"empty":         func(msg *message.Message) { msg.Metadata[payload.SignatureMetadata] = "" },
	} {
		stripped := encoded.Copy()
		change(stripped)
		stripped.Payload = forged.Payload
		t.Run("without "+name, func(t *testing.T) {
			refused(t, codec, stripped, payload.ErrUnsigned)
			refused(t, newCodec(t, onlySigned), stripped, payload.ErrUnsigned)
		})
	}
	for _, encoding := range []string{"", "gzip", "claim:" + claimed(t, encoded) + ":150"} {
		stripped := encoded.Copy()
		stripped.Metadata[payload.EncodingMetadata] = encoding
		refused(t, codec, stripped, payload.ErrSignature)
		delete(stripped.Metadata, payload.SignatureMetadata)
		refused(t, newCodec(t, onlyEncrypted), stripped, payload.ErrUnencrypted)
	}

	// A signature of a producer that signs less than this consumer needs.
	less := everything(store)
	less.SignedMetadata = nil
	refused(t, codec, encode(t, newCodec(t, less), order("order-1")), payload.ErrSignature)
	less.SignedMetadata = []string{"other", "name"}
	expectEqual(t, decode(t, codec, encode(t, newCodec(t, less), order("order-1"))), order("order-1"))

	// Other algorithms are refused, and so is an empty one.
	for _, signature := range []string{
		";;;", "none;sig-1;;", "hmac-sha256;;;", "hmac-sha256;sig-1;;", "hmac-sha512;sig-1;name;" + strings.Repeat("0", 64), "hmac-sha256;sig-1",
		"hmac-sha256;sig-1;" + strings.Repeat("name,", 1000) + ";" + hex.EncodeToString(make([]byte, 32)),
	} {
		for _, cfg := range []payload.Config{everything(store), onlySigned, onlyEncrypted} {
			msg := encoded.Copy()
			msg.Metadata[payload.SignatureMetadata] = signature
			if signature == "hmac-sha256;;;" {
				refused(t, newCodec(t, cfg), msg, payload.ErrUnknownKey)
				continue
			}
			refused(t, newCodec(t, cfg), msg, payload.ErrSignature)
		}
	}
}

// Nothing is fetched from the store before the signature is verified.
func TestDecode_ChecksTheSignatureFirst(t *testing.T) {
	t.Parallel()
	store := &objects{}
	codec := newCodec(t, everything(store))
	encoded := encode(t, codec, order("order-1"))
	for _, header := range []string{payload.SignatureMetadata, payload.TopicMetadata, outbox.KeyMetadata, "name"} {
		changed := encoded.Copy()
		changed.Metadata[header] += "x"
		refused(t, codec, changed, payload.ErrSignature)
	}
	refused(t, codec, renamed(encoded, "order-2"), payload.ErrSignature)
	if store.gets != 0 {
		t.Errorf("the store was asked %d times", store.gets)
	}
	decode(t, codec, encoded)
	if store.gets != 1 {
		t.Errorf("the store was asked %d times", store.gets)
	}
}
