package history

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// Sum identifies the content of a message: its payload and its metadata.
type Sum struct {
	Payload  string `json:"payload"`
	Metadata string `json:"metadata"`
}

// SumOf returns the sum of a message. Metadata that the library, Watermill or a quorum queue
// adds on the way does not count.
func SumOf(payload []byte, metadata map[string]string) Sum {
	names := make([]string, 0, len(metadata))
	for name := range metadata {
		if !strings.HasPrefix(name, "oncemill_") && name != "oncemill-created-at" && !strings.HasPrefix(name, "_watermill") && name != "x-delivery-count" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	hash := sha256.New()
	for _, name := range names {
		fmt.Fprintf(hash, "%d:%s%d:%s", len(name), name, len(metadata[name]), metadata[name])
	}
	return Sum{Payload: SumOfPayload(payload), Metadata: hex.EncodeToString(hash.Sum(nil)[:16])}
}

// SumOfPayload returns the part of a sum that is about the payload.
func SumOfPayload(payload []byte) string {
	sum := sha256.Sum256(payload)
	return hex.EncodeToString(sum[:16])
}
