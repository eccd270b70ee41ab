package payload_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

// secret returns a key of 32 bytes, different for each seed.
func secret(seed string) oncemill.Secret { return oncemill.NewSecret(secretBytes(seed)) }

func secretBytes(seed string) []byte {
	sum := sha256.Sum256([]byte(seed))
	return sum[:]
}

// keys returns keys with these ids; the first one is current.
func keys(ids ...string) payload.Keys {
	k := payload.Keys{Current: ids[0], Secrets: map[string]oncemill.Secret{}}
	for _, id := range ids {
		k.Secrets[id] = secret(id)
	}
	return k
}

// everything is a configuration that applies every step to every message.
func everything(store payload.Store) payload.Config {
	return payload.Config{
		CompressFrom: 1,
		Encryption:   keys("enc-1"), RequireEncryption: true,
		Store: store, StoreFrom: 1,
		Signature: keys("sig-1"), RequireSignature: true,
		SignedMetadata: []string{"name"},
	}
}

func newCodec(t testing.TB, cfg payload.Config) *payload.Codec {
	t.Helper()
	c, err := payload.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// order is a plain message that compresses well.
func order(id string) *message.Message {
	msg := message.NewMessage(id, []byte(strings.Repeat(`{"item":"tea","pieces":3}`, 8)))
	msg.Metadata.Set("name", "OrderPlaced")
	outbox.SetKey(msg, "customer-7")
	return msg
}

func encode(t testing.TB, c *payload.Codec, msg *message.Message) *message.Message {
	t.Helper()
	encoded, err := c.Encode(t.Context(), "orders", msg.Metadata.Get(outbox.KeyMetadata), msg)
	if err != nil {
		t.Fatal(err)
	}
	return encoded
}

func decode(t testing.TB, c *payload.Codec, msg *message.Message) *message.Message {
	t.Helper()
	plain, err := c.Decode(t.Context(), "orders", msg)
	if err != nil {
		t.Fatal(err)
	}
	return plain
}

// sentinels are all reasons of Decode.
var sentinels = []error{
	payload.ErrUnsigned, payload.ErrSignature, payload.ErrUnencrypted, payload.ErrCiphertext, payload.ErrEncoding,
	payload.ErrTooLarge, payload.ErrClaim, payload.ErrTopic, payload.ErrUnknownKey, payload.ErrStore,
}

// refused decodes msg and checks that it fails with want.
func refused(t testing.TB, c *payload.Codec, msg *message.Message, want error) {
	t.Helper()
	plain, err := c.Decode(t.Context(), "orders", msg)
	var bad *payload.DecodeError
	if !errors.As(err, &bad) || !errors.Is(err, want) || plain != nil {
		t.Errorf("decoded %v, error %v, want %v", plain, err, want)
		return
	}
	if temporary := errors.Is(want, payload.ErrUnknownKey) || errors.Is(want, payload.ErrStore); bad.Permanent() == temporary {
		t.Errorf("%v: permanent is %t", err, bad.Permanent())
	}
}

// refusedSomehow decodes a changed msg and checks that it fails for exactly one of the known
// reasons.
func refusedSomehow(t testing.TB, c *payload.Codec, msg *message.Message, what string) {
	t.Helper()
	plain, err := c.Decode(t.Context(), "", msg)
	if err == nil {
		t.Errorf("%s: accepted, payload %q", what, plain.Payload)
		return
	}
	reasons := slices.DeleteFunc(slices.Clone(sentinels), func(s error) bool { return !errors.Is(err, s) })
	if len(reasons) != 1 || len(err.Error()) > 400 {
		t.Errorf("%s: %v matches %v", what, err, reasons)
	}
}

// objects is a store in memory.
type objects struct {
	mu   sync.Mutex
	all  map[string][]byte
	puts int
	gets int
	fail error
}

func (o *objects) Put(_ context.Context, name string, body []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.puts++
	if o.fail != nil {
		return o.fail
	}
	if o.all == nil {
		o.all = map[string][]byte{}
	}
	o.all[name] = slices.Clone(body)
	return nil
}

func (o *objects) Get(_ context.Context, name string) (io.ReadCloser, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.gets++
	body, ok := o.all[name]
	switch {
	case o.fail != nil:
		return nil, o.fail
	case !ok:
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(body)), nil
}

// replaced returns a store with changed objects of o.
func (o *objects) replaced(change func([]byte) []byte) *objects {
	o.mu.Lock()
	defer o.mu.Unlock()
	other := &objects{all: maps.Clone(o.all)}
	for name, body := range other.all {
		other.all[name] = change(slices.Clone(body))
	}
	return other
}

func (o *objects) names() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Sorted(maps.Keys(o.all))
}

func expectEqual(t testing.TB, got, want *message.Message) {
	t.Helper()
	if !got.Equals(want) {
		t.Errorf("got %q %v %q, want %q %v %q", got.UUID, got.Metadata, got.Payload, want.UUID, want.Metadata, want.Payload)
	}
}
