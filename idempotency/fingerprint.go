package idempotency

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"mime/multipart"
	"net/url"
	"slices"
	"strings"
)

// ID identifies a claim. It is the hash of scope and key, neither of which can be derived
// from it, and all that is stored of them.
type ID [sha256.Size]byte

// String returns the first 12 hexadecimal digits, as shown in logs.
func (id ID) String() string { return fmt.Sprintf("%x", id[:6]) }

// Fingerprint distinguishes requests with the same key. The first byte is the version of
// the format.
type Fingerprint [1 + sha256.Size]byte

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

func newHasher(secret Secret) hasher {
	key := secret.bytes()
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

// BodyKind is how bodies are compared.
type BodyKind int

const (
	// BodyRaw compares bytes. It is the default.
	BodyRaw BodyKind = iota
	// BodyJSON compares bodies whose content type is JSON by [CanonicalJSON], so that white
	// space and the order of names do not matter.
	BodyJSON
)

// fingerprint hashes method, route, path, query, content type, the chosen headers and the
// whole body.
func (x *exchange) fingerprint(route, path string, body content) Fingerprint {
	contentType, params := mediaType(x.r.Header)
	if strings.HasPrefix(contentType, "multipart/") {
		delete(params, "boundary")
	}
	fields := [][]byte{
		[]byte("request"), []byte(x.r.Method), []byte(route), []byte(path),
		canonicalQuery(x.r.URL.RawQuery), canonicalType(contentType, params),
		[]byte(body.how), body.bytes,
	}
	for _, name := range x.cfg.Requests.Headers {
		fields = append(fields, []byte(name), framed(sha256.New(), bytesOf(x.r.Header.Values(name))...))
	}
	return newFingerprint(x.hash, fields...)
}

func isJSON(contentType string) bool {
	return contentType == "application/json" || strings.HasSuffix(contentType, "+json")
}

// canonicalQuery sorts by name and keeps the order of the values of a name. A query that
// cannot be parsed is returned unchanged.
func canonicalQuery(raw string) []byte {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return append([]byte("raw "), raw...)
	}
	return canonicalValues(values)
}

func canonicalType(contentType string, params map[string]string) []byte {
	values := url.Values{"": {contentType}}
	for name, value := range params {
		values.Set(name, value)
	}
	return canonicalValues(values)
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

func bytesOf(values []string) [][]byte {
	out := make([][]byte, len(values))
	for i, value := range values {
		out[i] = []byte(value)
	}
	return out
}

// maxParts bounds the work for a multipart body. net/http parses no form with more parts.
const maxParts = 1000

// hashParts hashes the headers and the content of every part, so that only the boundary
// between them does not matter.
func hashParts(body []byte, boundary string) ([]byte, error) {
	if boundary == "" {
		return nil, fmt.Errorf("%w: multipart without a boundary", errUnsupportedBody)
	}
	reader := multipart.NewReader(bytes.NewReader(body), boundary)
	buffer := make([]byte, 32<<10)
	var fields [][]byte
	for range maxParts + 1 {
		part, err := reader.NextRawPart()
		if errors.Is(err, io.EOF) {
			return framed(sha256.New(), fields...), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errUnsupportedBody, err)
		}
		sum, err := hashAll(part, buffer)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errUnsupportedBody, err)
		}
		fields = append(fields, canonicalValues(part.Header), sum)
	}
	return nil, fmt.Errorf("%w: more than %d parts", errUnsupportedBody, maxParts)
}

func hashAll(r io.Reader, buffer []byte) ([]byte, error) {
	h := sha256.New()
	_, err := io.CopyBuffer(h, r, buffer)
	return h.Sum(nil), err
}

// hashForm hashes a multipart form that was parsed outside the middleware.
func hashForm(form *multipart.Form) ([]byte, error) {
	buffer := make([]byte, 32<<10)
	fields := [][]byte{canonicalValues(form.Value)}
	for _, name := range slices.Sorted(maps.Keys(form.File)) {
		for _, header := range form.File[name] {
			file, err := header.Open()
			if err != nil {
				return nil, fmt.Errorf("%w: %w", errUnsupportedBody, err)
			}
			sum, err := hashAll(file, buffer)
			if err := errors.Join(err, file.Close()); err != nil {
				return nil, fmt.Errorf("%w: %w", errUnsupportedBody, err)
			}
			fields = append(fields, []byte(name), []byte(header.Filename), canonicalValues(header.Header), sum)
		}
	}
	return framed(sha256.New(), fields...), nil
}
