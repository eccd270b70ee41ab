package idempotency

import (
	"crypto/sha256"
	"net/http"
	"net/url"
	"strings"
)

// requestFingerprint hashes method, route, path, query, content type, the chosen headers
// and the whole body.
func requestFingerprint(h hasher, r *http.Request, route, path string, body content, headers []string) Fingerprint {
	contentType, params := mediaType(r.Header)
	if strings.HasPrefix(contentType, "multipart/") {
		delete(params, "boundary")
	}
	fields := [][]byte{
		[]byte("request"), []byte(r.Method), []byte(route), []byte(path),
		canonicalQuery(r.URL.RawQuery), canonicalType(contentType, params),
		[]byte(body.kind), body.bytes,
	}
	for _, name := range headers {
		values := r.Header.Values(name)
		if name == "Host" { // net/http keeps it elsewhere
			values = []string{r.Host}
		}
		fields = append(fields, []byte(name), framed(sha256.New(), bytesOf(values)...))
	}
	return newFingerprint(h, fields...)
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
