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
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// ID identifies a claim: the hash of scope and key, from which neither can be
// told. It is all that is stored of them.
type ID [sha256.Size]byte

// String returns the first 12 hexadecimal digits, which is what logs show.
func (id ID) String() string { return fmt.Sprintf("%x", id[:6]) }

// Fingerprint tells requests apart that come with the same key. The first byte is
// the version of the format.
type Fingerprint [1 + sha256.Size]byte

// fingerprintVersion changes with what is hashed, and how. Fingerprints of
// different versions differ.
const fingerprintVersion = 1

// framed hashes fields so that no two lists of fields look alike: their number
// first, then each behind its length.
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

// hashID hashes scope and key, under the secret if there is one.
func hashID(secret []byte, fields ...string) (id ID) {
	h := sha256.New()
	if len(secret) > 0 {
		h = hmac.New(sha256.New, secret)
	}
	parts := make([][]byte, len(fields))
	for i, field := range fields {
		parts[i] = []byte(field)
	}
	copy(id[:], framed(h, parts...))
	return id
}

func newFingerprint(fields ...[]byte) (f Fingerprint) {
	f[0] = fingerprintVersion
	copy(f[1:], framed(sha256.New(), fields...))
	return f
}

// BodyKind says how bodies are compared.
type BodyKind int

const (
	// BodyRaw compares bytes. It is the default.
	BodyRaw BodyKind = iota
	// BodyJSON compares bodies whose content type is JSON by [CanonicalJSON], so
	// that white space and the order of names do not matter.
	BodyJSON
)

var errUnsupportedBody = errors.New("idempotency: the body cannot be fingerprinted")

// fingerprintRequest hashes method, route, path, query, content type, the chosen
// headers and the whole body.
func fingerprintRequest(r *http.Request, route string, body []byte, kind BodyKind, headers []string) (Fingerprint, error) {
	contentType, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		contentType, params = r.Header.Get("Content-Type"), nil
	}
	how, content := "raw", body
	encoded := r.Header.Get("Content-Encoding")
	switch {
	case encoded != "" && !strings.EqualFold(encoded, "identity"):
		how = "encoded " + encoded
	case strings.HasPrefix(contentType, "multipart/") && params["boundary"] != "":
		if content, err = hashParts(body, params["boundary"]); err != nil {
			return Fingerprint{}, fmt.Errorf("%w: %w", errUnsupportedBody, err)
		}
		how = "parts"
		delete(params, "boundary")
	case strings.HasPrefix(contentType, "multipart/"):
		return Fingerprint{}, fmt.Errorf("%w: multipart without a boundary", errUnsupportedBody)
	case kind == BodyJSON && isJSON(contentType):
		if canonical, ok := CanonicalJSON(body); ok {
			how, content = "json", canonical
		}
	}
	fields := [][]byte{
		[]byte("request"), []byte(r.Method), []byte(route), []byte(r.URL.EscapedPath()),
		canonicalQuery(r.URL.RawQuery), canonicalType(contentType, params),
		[]byte(how), content,
	}
	for _, name := range headers {
		fields = append(fields, []byte(name), framed(sha256.New(), bytesOf(r.Header.Values(name))...))
	}
	return newFingerprint(fields...), nil
}

func isJSON(contentType string) bool {
	return contentType == "application/json" || strings.HasSuffix(contentType, "+json")
}

// canonicalQuery sorts by name and keeps the order of the values of a name. A
// query that cannot be parsed is taken as it is.
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

// hashParts hashes the headers and the content of every part, so that only the
// boundary between them does not matter.
func hashParts(body []byte, boundary string) ([]byte, error) {
	reader := multipart.NewReader(bytes.NewReader(body), boundary)
	var fields [][]byte
	for {
		part, err := reader.NextRawPart()
		if errors.Is(err, io.EOF) {
			return framed(sha256.New(), fields...), nil
		}
		if err != nil {
			return nil, err
		}
		content := sha256.New()
		if _, err := io.Copy(content, part); err != nil {
			return nil, err
		}
		fields = append(fields, canonicalValues(part.Header), content.Sum(nil))
	}
}
