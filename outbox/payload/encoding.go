package payload

import (
	"encoding/binary"
	"encoding/hex"
	"hash"
	"strconv"
	"strings"

	"github.com/oncemill/oncemill/internal/text"
)

// The codec's metadata, part of the wire format; see the package's comment.
const (
	EncodingMetadata  = "oncemill_encoding"
	SignatureMetadata = "oncemill_signature"
	TopicMetadata     = "oncemill_topic"
)

// keyMetadata is outbox.KeyMetadata, which cannot be imported here.
const keyMetadata = "oncemill_key"

// ownMetadata is set by Encode and removed by Decode.
var ownMetadata = [...]string{EncodingMetadata, SignatureMetadata, TopicMetadata}

const (
	gzipStep       = "gzip"
	encryptionStep = "aes-256-gcm:"
	claimStep      = "claim:"
)

// encoding is the list of steps that were applied to a payload. Each encoding has exactly one
// text: the order of steps and the format of each are fixed.
type encoding struct {
	gzip  bool
	keyID string // of the encryption, empty for none
	claim *claim
}

func (e encoding) String() string {
	var steps []string
	if e.gzip {
		steps = append(steps, gzipStep)
	}
	if e.keyID != "" {
		steps = append(steps, encryptionStep+e.keyID)
	}
	if e.claim != nil {
		steps = append(steps, claimStep+e.claim.String())
	}
	return strings.Join(steps, ",")
}

// additional is the additional data of the encryption: the steps so far, the key, and the
// message of the payload.
func (e encoding) additional(b binding) []byte {
	sealed := encoding{gzip: e.gzip, keyID: e.keyID}
	return frame("oncemill/payload/encryption/1", sealed.String(), b.id, b.topic, b.key)
}

func parseEncoding(s string) (encoding, error) {
	var e encoding
	if s == "" {
		return e, nil
	}
	for step := range strings.SplitSeq(s, ",") {
		if step == gzipStep {
			e.gzip = true
		} else if id, ok := strings.CutPrefix(step, encryptionStep); ok && keyIDPattern.MatchString(id) {
			e.keyID = id
		} else if reference, ok := strings.CutPrefix(step, claimStep); ok {
			e.claim = parseClaim(reference)
		}
	}
	// Unknown, repeated, misplaced or differently written steps do not format to the same
	// text.
	if e.String() != s {
		return encoding{}, detailed(ErrEncoding, "%q", text.Shorten(s))
	}
	return e, nil
}

// parseClaim returns nil if text is not a claim.
func parseClaim(text string) *claim {
	name, size, _ := strings.Cut(text, ":")
	place, sum, _ := strings.Cut(name, "-")
	var c claim
	var err error
	if c.size, err = strconv.Atoi(size); err != nil || c.size < 0 {
		return nil
	}
	if !decodeHex(c.place[:], place) || !decodeHex(c.sum[:], sum) {
		return nil
	}
	return &c
}

func decodeHex(to []byte, text string) bool {
	if len(text) != hex.EncodedLen(len(to)) {
		return false
	}
	_, err := hex.Decode(to, []byte(text))
	return err == nil
}

// frame joins parts so that different lists of parts give different bytes.
func frame(parts ...string) []byte {
	size := 0
	for _, part := range parts {
		size += 8 + len(part)
	}
	joined := make([]byte, 0, size)
	for _, part := range parts {
		joined = binary.BigEndian.AppendUint64(joined, uint64(len(part)))
		joined = append(joined, part...)
	}
	return joined
}

// writeFramed adds one part to a hash.
func writeFramed(to hash.Hash, part []byte) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(part)))
	to.Write(length[:])
	to.Write(part)
}
