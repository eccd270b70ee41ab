package payload

import (
	"encoding/binary"
	"encoding/hex"
	"hash"
	"strconv"
	"strings"
)

// The metadata of the codec; see the package's comment. They are part of the
// format on the wire.
const (
	EncodingMetadata  = "oncemill_encoding"
	SignatureMetadata = "oncemill_signature"
	TopicMetadata     = "oncemill_topic"
)

// keyMetadata is outbox.KeyMetadata, which cannot be imported here.
const keyMetadata = "oncemill_key"

// ownMetadata are written by Encode and taken away by Decode.
var ownMetadata = [...]string{EncodingMetadata, SignatureMetadata, TopicMetadata}

const (
	gzipStep       = "gzip"
	encryptionStep = "aes-256-gcm:"
	claimStep      = "claim:"
)

// encoding says what was done to a payload. There is one order of the steps and
// one way to write each, so nothing can be said in two ways.
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

// additional is the additional data of the encryption: what was done before, with
// which key, and whose payload it is.
func (e encoding) additional(b binding) []byte {
	sealed := encoding{gzip: e.gzip, keyID: e.keyID}
	return frame("oncemill/payload/encryption/1", sealed.String(), b.id, b.topic, b.key)
}

func parseEncoding(text string) (encoding, error) {
	var e encoding
	if text == "" {
		return e, nil
	}
	for step := range strings.SplitSeq(text, ",") {
		if step == gzipStep {
			e.gzip = true
		} else if id, ok := strings.CutPrefix(step, encryptionStep); ok && keyIDPattern.MatchString(id) {
			e.keyID = id
		} else if reference, ok := strings.CutPrefix(step, claimStep); ok {
			e.claim = parseClaim(reference)
		}
	}
	// What is unknown, twice, out of order or written in another way is not
	// written again.
	if e.String() != text {
		return encoding{}, detailed(ErrEncoding, "%q", shorten(text))
	}
	return e, nil
}

// parseClaim returns nil for what is none.
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

// frame joins parts so that no two lists of parts give the same bytes.
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

// writeFramed adds one more part to what is hashed.
func writeFramed(to hash.Hash, part []byte) {
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(part)))
	to.Write(length[:])
	to.Write(part)
}
