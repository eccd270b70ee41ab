package idempotency

import (
	"context"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"strings"
)

// content is the part of a body that is compared, and how it was read.
type content struct {
	how   string
	bytes []byte
}

// readBody reads all of the body; false means that the request has been answered.
func (x *exchange) readBody() bool {
	if x.r.ContentLength > x.cfg.Requests.MaxBody {
		// Before a byte is read: a client that expects 100-continue then sends none.
		x.refuse(ProblemBodyTooLarge)
		return false
	}
	if x.r.Body == nil || x.r.Body == http.NoBody {
		return true
	}
	body, err := io.ReadAll(http.MaxBytesReader(x.w, x.r.Body, x.cfg.Requests.MaxBody))
	if err != nil {
		x.refuse(bodyProblem(err))
		return false
	}
	x.body = body
	return true
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

// compared returns the part of the body that is compared; false means that the request has
// been answered.
func (x *exchange) compared(ctx context.Context) (content, bool) {
	c, err := x.content()
	switch {
	case err == nil:
		return c, true
	case errors.Is(err, errBodyTaken):
		x.cfg.Logger.ErrorContext(ctx, "request body was read before the idempotency middleware", "endpoint", x.claim.Endpoint,
			"problem", "move the middleware before whatever reads the body, or put the body back into the request")
		x.refuse(ProblemInternal)
	default:
		x.refuse(ProblemUnsupportedBody)
	}
	return content{}, false
}

// content returns the part of the body that is compared. If an outer middleware has parsed
// a form, the handler sees the form, and nothing of the body may be left. If there is a
// body, it takes precedence: the middleware may have looked for a form and found none.
func (x *exchange) content() (content, error) {
	contentType, params := mediaType(x.r.Header)
	gone := int64(len(x.body)) < x.r.ContentLength || x.r.ContentLength < 0 && len(x.body) == 0
	parts := x.r.MultipartForm
	switch encoded := x.r.Header.Get("Content-Encoding"); {
	case gone && parts != nil && len(parts.Value)+len(parts.File) > 0:
		sum, err := hashForm(x.r.MultipartForm)
		return content{"parsed parts", sum}, err
	case gone && len(x.r.PostForm) > 0 && contentType == "application/x-www-form-urlencoded":
		return content{"parsed form", canonicalValues(x.r.PostForm)}, nil
	case int64(len(x.body)) < x.r.ContentLength:
		return content{}, errBodyTaken
	case encoded != "" && !strings.EqualFold(encoded, "identity"):
		return content{"encoded " + encoded, x.body}, nil
	case strings.HasPrefix(contentType, "multipart/"):
		sum, err := hashParts(x.body, params["boundary"])
		return content{"parts", sum}, err
	case x.cfg.Requests.Body == BodyJSON && isJSON(contentType):
		if canonical, ok := CanonicalJSON(x.body); ok {
			return content{"json", canonical}, nil
		}
	}
	return content{"raw", x.body}, nil
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
