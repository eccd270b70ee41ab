package idempotency

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"slices"
	"strings"
)

// content is the part of a body that is compared, and how it was read.
type content struct {
	kind  string
	bytes []byte
}

// readBody reads all of the body, up to most bytes, or returns the problem with it. The
// body is nil if there is none.
func readBody(w http.ResponseWriter, r *http.Request, most int64) (body []byte, problem string) {
	if r.ContentLength > most {
		// Before a byte is read: a client that expects 100-continue then sends none.
		return nil, ProblemBodyTooLarge
	}
	if r.Body == nil || r.Body == http.NoBody {
		return nil, ""
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if err != nil {
		return nil, bodyProblem(err)
	}
	return body, ""
}

// bodyProblem distinguishes a client that was too slow, one that broke off, and one that
// sent too much.
func bodyProblem(err error) string {
	var slow net.Error
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return ProblemBodyTooLarge
	case errors.As(err, &slow) && slow.Timeout():
		return ProblemBodyTimeout
	}
	return ProblemBodyBroken
}

var (
	errUnsupportedBody = errors.New("idempotency: the body cannot be fingerprinted")
	errBodyTaken       = errors.New("idempotency: the body was read before")
)

// contentOf returns the part of a body that is compared. If an outer middleware has parsed
// a form, the handler sees the form, and nothing of the body may be left. If there is a
// body, it takes precedence: the middleware may have looked for a form and found none.
func contentOf(r *http.Request, body []byte, kind BodyKind) (content, error) {
	contentType, params := mediaType(r.Header)
	gone := int64(len(body)) < r.ContentLength || r.ContentLength < 0 && len(body) == 0
	parts := r.MultipartForm
	switch encoded := r.Header.Get("Content-Encoding"); {
	case gone && parts != nil && len(parts.Value)+len(parts.File) > 0:
		sum, err := hashForm(r.MultipartForm)
		return content{"parsed parts", sum}, err
	case gone && len(r.PostForm) > 0 && contentType == "application/x-www-form-urlencoded":
		return content{"parsed form", canonicalValues(r.PostForm)}, nil
	case gone && (r.ContentLength > 0 || isJSON(contentType)): // empty text is no JSON (RFC 8259)
		return content{}, errBodyTaken
	case encoded != "" && !strings.EqualFold(encoded, "identity"):
		return content{"encoded " + encoded, body}, nil
	case strings.HasPrefix(contentType, "multipart/"):
		sum, err := hashParts(body, params["boundary"])
		return content{"parts", sum}, err
	case kind == BodyJSON && isJSON(contentType):
		if canonical, ok := CanonicalJSON(body); ok {
			return content{"json", canonical}, nil
		}
	}
	return content{"raw", body}, nil
}

// mediaType returns the content type in the form that is compared, and its parameters. A
// type that cannot be parsed is returned unchanged.
func mediaType(h http.Header) (contentType string, params map[string]string) {
	contentType, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return h.Get("Content-Type"), nil
	}
	return contentType, params
}

func isJSON(contentType string) bool {
	return contentType == "application/json" || strings.HasSuffix(contentType, "+json")
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
		if err == io.EOF && isClosed(body, boundary) { //nolint:errorlint // a wrapped one is a body that breaks off
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

// isClosed reports whether a multipart body has its last delimiter. Without it, the reader finds no part in
// anything, and an end within the headers of a part is an end.
func isClosed(body []byte, boundary string) bool {
	last := []byte("--" + boundary + "--")
	for line := range bytes.Lines(body) {
		if bytes.Equal(bytes.TrimRight(line, " \t\r\n"), last) {
			return true
		}
	}
	return false
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
