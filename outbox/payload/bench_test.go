package payload_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox/payload"
)

// document returns a JSON document of at least size bytes, like those of services.
func document(size int) []byte {
	random := rand.New(rand.NewPCG(1, 1))
	type line struct {
		SKU    string `json:"sku"`
		Pieces int    `json:"pieces"`
		Cents  int    `json:"cents"`
		Name   string `json:"name"`
	}
	var lines []line
	var text []byte
	for len(text) < size {
		for range 1 + len(lines)/4 {
			name := []string{"green tea", "black tea", "coffee", "espresso cup"}[random.IntN(4)]
			lines = append(lines, line{fmt.Sprintf("SKU-%06d", random.IntN(1e6)), 1 + random.IntN(9), random.IntN(1e5), name})
		}
		text, _ = json.Marshal(map[string]any{"order": "order-1", "customer": "customer-7", "lines": lines})
	}
	return text[:size]
}

func BenchmarkCodec(b *testing.B) {
	steps := []struct {
		name string
		cfg  payload.Config
	}{
		{"none", payload.Config{}},
		{"gzip", payload.Config{CompressFrom: 1}},
		{"encrypt", payload.Config{Encryption: keys("e")}},
		{"claim", payload.Config{Store: &objects{}, StoreFrom: 1}},
		{"sign", payload.Config{Signature: keys("s"), SignedMetadata: []string{"name"}}},
		{"all", everything(&objects{})},
	}
	for _, size := range []int{512, 8 << 10, 256 << 10} {
		for _, step := range steps {
			codec := newCodec(b, step.cfg)
			msg := message.NewMessage("order-1", document(size))
			encoded := encode(b, codec, msg)
			b.Run(fmt.Sprintf("encode/%s/%d", step.name, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					encode(b, codec, msg)
				}
			})
			b.Run(fmt.Sprintf("decode/%s/%d", step.name, size), func(b *testing.B) {
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					decode(b, codec, encoded)
				}
			})
		}
	}
}
