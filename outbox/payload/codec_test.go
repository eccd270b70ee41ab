package payload_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// Whatever the steps and the message, a consumer with the keys and the store decodes what was
// sent, using only the message's own metadata.
func TestCodec_DecodesWhatItEncoded(t *testing.T) {
	t.Parallel()
	store := &objects{}
	consumer := newCodec(t, payload.Config{
		Encryption: payload.Keys{Secrets: keys("e1", "e2").Secrets}, Signature: payload.Keys{Secrets: keys("s1", "s2").Secrets}, Store: store,
	})
	taken := map[string]int{}
	for seed := range uint64(800) {
		random := rand.New(rand.NewPCG(seed, 0))
		cfg := randomConfig(random, store)
		plain, topic, key := randomMessage(random)
		encoded, err := newCodec(t, cfg).Encode(t.Context(), topic, key, plain)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		got, err := consumer.Decode(t.Context(), topic, encoded)
		if err != nil {
			t.Fatalf("seed %d: %v, metadata %q", seed, err, encoded.Metadata)
		}
		if !got.Equals(plain) {
			t.Fatalf("seed %d: got %q, want %q, metadata %v, %v", seed, got.Payload, plain.Payload, got.Metadata, plain.Metadata)
		}
		for step := range strings.SplitSeq(encoded.Metadata.Get(payload.EncodingMetadata), ",") {
			name, _, _ := strings.Cut(step, ":")
			taken[name]++
		}
		if encoded.Metadata.Get(payload.SignatureMetadata) != "" {
			taken["signed"]++
		}
		if name := "aes-256-gcm"; cfg.Encryption.Current != "" && bytes.Contains(encoded.Payload, plain.Payload) && len(plain.Payload) > 3 {
			t.Errorf("seed %d: %s left the payload readable", seed, name)
		}
	}
	for _, step := range []string{"", "gzip", "aes-256-gcm", "claim", "signed"} {
		if taken[step] < 100 {
			t.Errorf("step %q was taken %d times: %v", step, taken[step], taken)
		}
	}
}

func randomConfig(random *rand.Rand, store payload.Store) payload.Config {
	cfg := payload.Config{CompressFrom: random.IntN(3) * random.IntN(200)}
	if random.IntN(2) == 0 {
		cfg.Encryption = keys([]string{"e1", "e2"}[random.IntN(2)])
	}
	if random.IntN(2) == 0 {
		cfg.Store, cfg.StoreFrom = store, 1+random.IntN(2000)
	}
	if random.IntN(2) == 0 {
		cfg.Signature = keys([]string{"s1", "s2"}[random.IntN(2)])
		cfg.SignedMetadata = [][]string{nil, {"name"}, {"name", "absent"}}[random.IntN(3)]
	}
	return cfg
}

func randomMessage(random *rand.Rand) (msg *message.Message, topic, key string) {
	text := func(most int) string {
		runes := make([]rune, random.IntN(most))
		for i := range runes {
			runes[i] = []rune("ab;:,-=\"\\ é世\n")[random.IntN(13)]
		}
		return string(runes)
	}
	body := make([]byte, random.IntN(3)*random.IntN(3000))
	variety := 1 + random.IntN(256)
	for i := range body {
		body[i] = byte(random.IntN(variety))
	}
	msg = message.NewMessage("id"+text(20), body)
	for range random.IntN(4) {
		msg.Metadata.Set(text(10)+"x", text(10))
	}
	msg.Metadata.Set("name", text(10))
	topic, key = "topic"+text(10), text(10)
	outbox.SetKey(msg, key)
	return msg, topic, key
}

func TestCodec_DoesNotChangeTheCallersMessage(t *testing.T) {
	t.Parallel()
	store := &objects{}
	codec := newCodec(t, everything(store))
	type contextKey struct{}
	plain, untouched := order("1"), order("1")
	plain.SetContext(context.WithValue(t.Context(), contextKey{}, "mine"))

	encoded := encode(t, codec, plain)
	expectEqual(t, plain, untouched)
	if again := encode(t, codec, plain); again.Metadata.Get(payload.EncodingMetadata) == encoded.Metadata.Get(payload.EncodingMetadata) {
		t.Error("two encryptions of a message are the same")
	}
	before := encoded.Copy()
	decoded := decode(t, codec, encoded)
	expectEqual(t, encoded, before)
	expectEqual(t, decoded, untouched)
	for _, msg := range []*message.Message{encoded, decoded} {
		if msg.Context().Value(contextKey{}) != "mine" {
			t.Error("the context is lost")
		}
	}
	// A decoded message can be published again.
	expectEqual(t, decode(t, codec, encode(t, codec, decoded)), untouched)
}

func TestCodec_WithoutConfigurationPassesEverythingPlainThrough(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, payload.Config{})
	for _, msg := range []*message.Message{order("1"), message.NewMessage("", nil), {UUID: "no metadata"}} {
		encoded := encode(t, codec, msg)
		expectEqual(t, encoded, msg)
		expectEqual(t, decode(t, codec, encoded), msg)
	}
}

func TestCodec_CompressesLargePayloadsThatGetSmaller(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, payload.Config{CompressFrom: 200})
	noise := make([]byte, 5000)
	random := rand.NewChaCha8([32]byte{1})
	random.Read(noise)
	for name, c := range map[string]struct {
		body       []byte
		compressed bool
	}{
		"too small":    {bytes.Repeat([]byte("a"), 199), false},
		"large enough": {bytes.Repeat([]byte("a"), 200), true},
		"noise":        {noise, false},
		"empty":        {nil, false},
	} {
		encoded := encode(t, codec, message.NewMessage("1", c.body))
		if got := encoded.Metadata.Get(payload.EncodingMetadata) == "gzip"; got != c.compressed {
			t.Errorf("%s: compressed is %t", name, got)
		}
		if c.compressed && len(encoded.Payload) >= len(c.body) || !c.compressed && (len(encoded.Metadata) > 0 || !bytes.Equal(encoded.Payload, c.body)) {
			t.Errorf("%s: %d bytes became %d, metadata %v", name, len(c.body), len(encoded.Payload), encoded.Metadata)
		}
	}
}

func TestCodec_RefusesEncodedMessages(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, everything(&objects{}))
	for _, name := range []string{payload.EncodingMetadata, payload.SignatureMetadata, payload.TopicMetadata} {
		for _, value := range []string{"", "x"} {
			msg := order("1")
			msg.Metadata.Set(name, value)
			if _, err := codec.Encode(t.Context(), "orders", "", msg); !errors.Is(err, payload.ErrReserved) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := codec.Encode(t.Context(), "orders", "", encode(t, codec, order("1"))); !errors.Is(err, payload.ErrReserved) {
		t.Errorf("encoded twice: %v", err)
	}
}

// The key from the outbox counts, not the one in the metadata.
func TestCodec_BindsTheKeyThatItIsGiven(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, everything(&objects{}))
	for _, key := range []string{"", "the key"} {
		encoded, err := codec.Encode(t.Context(), "orders", key, order("1"))
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := decode(t, codec, encoded).Metadata[outbox.KeyMetadata]; got != key || ok != (key != "") {
			t.Errorf("got %q, %t, want %q", got, ok, key)
		}
	}
}

// A codec does not write messages that a codec of the same configuration would refuse.
func TestCodec_WritesOnlyWhatItRequires(t *testing.T) {
	t.Parallel()
	for want, cfg := range map[error]payload.Config{
		payload.ErrUnencrypted: {Encryption: payload.Keys{Secrets: keys("e").Secrets}, RequireEncryption: true},
		payload.ErrUnsigned:    {Signature: payload.Keys{Secrets: keys("s").Secrets}, RequireSignature: true},
		payload.ErrTooLarge:    {MaxSize: 199},
	} {
		if encoded, err := newCodec(t, cfg).Encode(t.Context(), "orders", "", order("1")); !errors.Is(err, want) || encoded != nil {
			t.Errorf("got %v, want %v", err, want)
		}
	}
	encode(t, newCodec(t, payload.Config{MaxSize: 200}), order("1"))
}

func TestCodec_RotatesKeys(t *testing.T) {
	t.Parallel()
	old := newCodec(t, payload.Config{Encryption: keys("e1"), Signature: keys("s1"), RequireEncryption: true, RequireSignature: true})
	both := newCodec(t, payload.Config{Encryption: keys("e2", "e1"), Signature: keys("s2", "s1"), RequireEncryption: true, RequireSignature: true})
	current := newCodec(t, payload.Config{Encryption: keys("e2"), Signature: keys("s2"), RequireEncryption: true, RequireSignature: true})
	first, second := encode(t, old, order("1")), encode(t, both, order("2"))
	expectEqual(t, decode(t, both, first), order("1"))
	expectEqual(t, decode(t, both, second), order("2"))
	expectEqual(t, decode(t, current, second), order("2"))
	refused(t, old, second, payload.ErrUnknownKey)
	refused(t, current, first, payload.ErrUnknownKey)

	onlySigned := newCodec(t, payload.Config{Encryption: keys("e2"), Signature: keys("s1")})
	refused(t, onlySigned, first, payload.ErrUnknownKey)
	refused(t, newCodec(t, payload.Config{}), first, payload.ErrUnknownKey)

	// Other keys with the same ids are refused.
	swapped := keys("e1")
	swapped.Secrets["e1"] = secret("another")
	refused(t, newCodec(t, payload.Config{Encryption: swapped}), first, payload.ErrCiphertext)
	swapped = keys("s1")
	swapped.Secrets["s1"] = secret("another")
	refused(t, newCodec(t, payload.Config{Encryption: keys("e1"), Signature: swapped}), first, payload.ErrSignature)
}

func TestCodec_ComparesTheTopic(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]payload.Config{
		"encrypted": {Encryption: keys("e")}, "signed": {Signature: keys("s")}, "claimed": {Store: &objects{}, StoreFrom: 1},
	} {
		encoded := encode(t, newCodec(t, cfg), order("1"))
		for _, topic := range []string{"orders", ""} {
			if _, err := newCodec(t, cfg).Decode(t.Context(), topic, encoded); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := newCodec(t, cfg).Decode(t.Context(), "refunds", encoded); !errors.Is(err, payload.ErrTopic) {
			t.Errorf("%s from another topic: %v", name, err)
		}
		var asked []string
		cfg.Topic = func(subscribed, published string) bool {
			asked = append(asked, subscribed, published)
			return subscribed == "ord*"
		}
		patterns := newCodec(t, cfg)
		if _, err := patterns.Decode(t.Context(), "ord*", encoded); err != nil {
			t.Errorf("%s by a pattern: %v", name, err)
		}
		if _, err := patterns.Decode(t.Context(), "ref*", encoded); !errors.Is(err, payload.ErrTopic) {
			t.Errorf("%s by another pattern: %v", name, err)
		}
		if fmt.Sprint(asked) != "[ord* orders ref* orders]" {
			t.Errorf("asked for %v", asked)
		}
		cfg.Topic = func(string, string) bool { panic("no such pattern") }
		if _, err := newCodec(t, cfg).Decode(t.Context(), "ord*", encoded); !errors.Is(err, payload.ErrTopic) || !strings.Contains(err.Error(), "no such pattern") {
			t.Errorf("%s by a function that panics: %v", name, err)
		}
	}
}

// The names of the metadata are part of the wire format.
func TestCodec_SharesTheOutboxsKey(t *testing.T) {
	t.Parallel()
	encoded, err := newCodec(t, payload.Config{Signature: keys("s")}).Encode(t.Context(), "orders", "the key", message.NewMessage("1", nil))
	if err != nil || encoded.Metadata.Get(outbox.KeyMetadata) != "the key" {
		t.Errorf("got %v, %v", encoded, err)
	}
}
