package idempotency

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash"
	"slices"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/secret"
)

// ID identifies a claim. It is the hash of scope and key, neither of which can be derived
// from it, and all that is stored of them.
type ID [sha256.Size]byte

// String returns the first 12 hexadecimal digits, as shown in logs.
func (id ID) String() string { return fmt.Sprintf("%x", id[:6]) }

func statusToken(id ID) string { return base64.RawURLEncoding.EncodeToString(id[:]) }

func parseToken(token string) (ID, bool) {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) != len(ID{}) {
		return ID{}, false
	}
	return ID(raw), true
}

// Fingerprint distinguishes requests with the same key. The first byte is the version of
// the format.
type Fingerprint [1 + sha256.Size]byte

// String returns the first 12 hexadecimal digits of the hash, as shown in logs.
func (f Fingerprint) String() string { return fmt.Sprintf("%x", f[1:7]) }

// fingerprintVersion changes when other data is hashed, or hashed in another way.
const fingerprintVersion = 2

// matches reports whether both may be of the same request. Fingerprints of different
// versions cannot be compared. Those of another version are accepted, because otherwise
// every retry across an upgrade would be refused.
func (f Fingerprint) matches(other Fingerprint) bool {
	return f == other || f[0] != other[0]
}

// hasher makes the hash of keys and fingerprints: SHA-256, or an HMAC of it.
type hasher func() hash.Hash

func newHasher(s oncemill.Secret) hasher {
	key := secret.Bytes(s)
	if len(key) == 0 {
		return sha256.New
	}
	return func() hash.Hash { return hmac.New(sha256.New, key) }
}

// framed hashes fields so that no two lists of fields have the same hash input: their
// number first, then each field after its length.
func framed(h hash.Hash, fields ...[]byte) []byte {
	var size [8]byte
	binary.BigEndian.PutUint64(size[:], uint64(len(fields)))
	h.Write(size[:])
	for _, field := range fields {
		binary.BigEndian.PutUint64(size[:], uint64(len(field)))
		h.Write(size[:])
		h.Write(field)
	}
	return h.Sum(nil)
}

// hashID hashes scope and key.
func hashID(h hasher, fields ...string) (id ID) {
	parts := make([][]byte, len(fields))
	for i, field := range fields {
		parts[i] = []byte(field)
	}
	copy(id[:], framed(h(), parts...))
	return id
}

func newFingerprint(h hasher, fields ...[]byte) (f Fingerprint) {
	f[0] = fingerprintVersion
	copy(f[1:], framed(h(), fields...))
	return f
}

func bytesOf(values []string) [][]byte {
	out := make([][]byte, len(values))
	for i, value := range values {
		out[i] = []byte(value)
	}
	return out
}

func canonicalValues(values map[string][]string) []byte {
	names := make([]string, 0, len(values))
	for name := range values {
		names = append(names, name)
	}
	slices.Sort(names)
	var fields [][]byte
	for _, name := range names {
		fields = append(fields, []byte(name), framed(sha256.New(), bytesOf(values[name])...))
	}
	return framed(sha256.New(), fields...)
}
