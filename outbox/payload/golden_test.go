package payload_test

import (
	_ "embed"
	"encoding/json"
	"slices"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox/payload"
)

//go:embed testdata/golden.json
var goldenFile []byte

type goldenMessage struct {
	Name           string            `json:"name"`
	ID             string            `json:"id"`
	Topic          string            `json:"topic"`
	Key            string            `json:"key"`
	Metadata       message.Metadata  `json:"metadata"`
	Payload        []byte            `json:"payload"`
	Wire           message.Metadata  `json:"wire"`
	Body           []byte            `json:"body"`
	Objects        map[string][]byte `json:"objects"`
	SignedMetadata []string          `json:"signed_metadata"`
	Steps          []string          `json:"steps"`
}

func goldenMessages(t testing.TB) (all []goldenMessage) {
	t.Helper()
	if err := json.Unmarshal(goldenFile, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

func (g goldenMessage) encoded() *message.Message {
	return &message.Message{UUID: g.ID, Metadata: g.Wire, Payload: g.Body}
}

func (g goldenMessage) plain() *message.Message {
	return &message.Message{UUID: g.ID, Metadata: g.Metadata, Payload: g.Payload}
}

// goldenConfig has the keys of golden.py.
func goldenConfig(store payload.Store) payload.Config {
	ascending := func(from, n int) oncemill.Secret {
		bytes := make([]byte, n)
		for i := range bytes {
			bytes[i] = byte(from + i)
		}
		return oncemill.NewSecret(bytes)
	}
	return payload.Config{
		Encryption: payload.Keys{Secrets: map[string]oncemill.Secret{"enc-1": ascending(0, 32)}},
		Signature:  payload.Keys{Secrets: map[string]oncemill.Secret{"sig.A_2": ascending(100, 48)}},
		Store:      store,
	}
}

// Another program encoded these messages by the package's comment. Messages on the wire, in
// stores and in histories stay readable.
func TestCodec_KeepsItsFormat(t *testing.T) {
	t.Parallel()
	all := goldenMessages(t)
	if len(all) < 9 {
		t.Errorf("%d messages", len(all))
	}
	for _, g := range all {
		store := &objects{all: g.Objects}
		cfg := goldenConfig(store)
		cfg.RequireSignature = slices.Contains(g.Steps, "sign")
		cfg.RequireEncryption = slices.Contains(g.Steps, "encrypt")
		cfg.SignedMetadata = g.SignedMetadata
		got, err := newCodec(t, cfg).Decode(t.Context(), g.Topic, g.encoded())
		if err != nil {
			t.Errorf("%s: %v", g.Name, err)
			continue
		}
		expectEqual(t, got, g.plain())
		if slices.Contains(g.Steps, "encrypt") || slices.Contains(g.Steps, "gzip") {
			continue // random nonces; compressors differ
		}
		written := &objects{}
		cfg.Store = written
		if slices.Contains(g.Steps, "claim") {
			cfg.StoreFrom = 1
		}
		if cfg.RequireSignature {
			cfg.Signature.Current = "sig.A_2"
		}
		encoded, err := newCodec(t, cfg).Encode(t.Context(), g.Topic, g.Key, g.plain())
		if err != nil {
			t.Fatal(err)
		}
		expectEqual(t, encoded, g.encoded())
		if len(written.all) != len(g.Objects) {
			t.Errorf("%s: objects %v", g.Name, written.names())
		}
		for name, body := range g.Objects {
			if string(written.all[name]) != string(body) {
				t.Errorf("%s: object %s differs", g.Name, name)
			}
		}
	}
}
