// Package client sends HTTP requests that may be repeated: one Idempotency-Key for each
// logical request, the same on every attempt.
//
//	transport, err := client.New(http.DefaultTransport, client.Config{})
//	shop := &http.Client{Transport: transport}
//	...
//	ctx = client.WithKey(ctx, key) // chosen and stored before the first call, for retries
//	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
//	response, err := shop.Do(request)
//
// A retry after a crash of the caller is another call of Do. It is the same request only
// if the caller stores the key, for example in the row of the order. Without such a key,
// each call of Do makes one, which covers only the attempts of that call.
//
// Go's own http.Transport also resends a request that carries an Idempotency-Key, with the
// same key, when a reused connection breaks.
package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"

	crand "crypto/rand"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Config configures a Transport. The zero value is right for most clients.
type Config struct {
	// Header is the name of the key's header. Default: "Idempotency-Key".
	Header string

	// Methods are the methods whose requests get a key, in upper case. Default: POST, PUT
	// and PATCH.
	Methods []string

	// Attempts is the largest number of times that a request is sent. Default: 3.
	Attempts int

	// Pause is how long to wait before another attempt if the response has no Retry-After; up
	// to a quarter of it is added at random. Default: 2 s.
	Pause time.Duration

	// MaxPause is the longest Retry-After that is honored. If a server asks for more, the
	// request is not sent again. Default: 1 min, or twice Pause if that is longer.
	MaxPause time.Duration

	// MaxBody is the largest body in bytes that is kept for further attempts; a
	// larger one without GetBody is sent once. Default: 10 MiB. At most 1 GiB.
	MaxBody int64
}

// Transport is an http.RoundTripper that retries. It is safe for concurrent use.
//
// It sends again after a connection error, after 408, 425, 429, 502, 503 and 504, and
// after a 202 or 409 whose problem is in-progress (or a 409 that has Retry-After). It never
// sends again after 422, which means that the key belongs to another request.
type Transport struct {
	base http.RoundTripper
	cfg  Config
}

// New returns a transport that sends through base. All bad values of cfg are
// reported at once, each as an [*oncemill.ConfigError].
func New(base http.RoundTripper, cfg Config) (*Transport, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "client.Config." + field, Value: value, Problem: problem})
	}
	if base == nil {
		errs = append(errs, &oncemill.ConfigError{Field: "client.New base", Value: "nil", Problem: "a RoundTripper is needed, for example http.DefaultTransport"})
	}
	if cfg.Header == "" {
		cfg.Header = "Idempotency-Key"
	}
	cfg.Header = textproto.CanonicalMIMEHeaderKey(cfg.Header)
	if len(cfg.Methods) == 0 {
		cfg.Methods = []string{http.MethodPost, http.MethodPut, http.MethodPatch}
	}
	if slices.ContainsFunc(cfg.Methods, func(m string) bool { return m == "" || m != strings.ToUpper(m) }) {
		bad("Methods", strings.Join(cfg.Methods, ","), "must be in upper case, as requests have them; others would get no key")
	}
	if cfg.Attempts == 0 {
		cfg.Attempts = 3
	}
	if cfg.Attempts < 1 || cfg.Attempts > 100 {
		bad("Attempts", strconv.Itoa(cfg.Attempts), "must be 1 to 100, or 0 for 3")
	}
	if cfg.Pause == 0 {
		cfg.Pause = 2 * time.Second
	}
	if cfg.Pause < time.Millisecond {
		bad("Pause", cfg.Pause.String(), "must be at least 1ms, or 0 for 2s")
	}
	if cfg.MaxPause == 0 {
		cfg.MaxPause = max(time.Minute, 2*cfg.Pause)
	}
	if cfg.MaxPause < cfg.Pause {
		bad("MaxPause", cfg.MaxPause.String(), "must not be shorter than Pause")
	}
	if cfg.MaxBody == 0 {
		cfg.MaxBody = 10 << 20
	}
	if cfg.MaxBody < 0 || cfg.MaxBody > 1<<30 {
		bad("MaxBody", strconv.FormatInt(cfg.MaxBody, 10), "must be 1 to 1073741824 bytes, or 0 for 10 MiB")
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Transport{base: base, cfg: cfg}, nil
}

type keyKey struct{}

// WithKey returns a context whose requests carry key. A key header set on the request
// itself takes precedence.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyKey{}, key)
}

// NewKey returns a random key, a UUID.
func NewKey() string {
	var b [16]byte
	crand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return format(b)
}

// DeriveKey returns a key that is the same for the same parts. It is for a caller that
// cannot store a key, but knows what makes its operation unique, for example ("pay",
// invoice). Use it only if the same parts never mean two operations.
func DeriveKey(parts ...string) string {
	h := sha256.New()
	var size [8]byte
	for _, part := range parts {
		binary.BigEndian.PutUint64(size[:], uint64(len(part)))
		h.Write(size[:])
		h.Write([]byte(part))
	}
	var b [16]byte
	copy(b[:], h.Sum(nil))
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	return format(b)
}

func format(b [16]byte) string {
	s := hex.EncodeToString(b[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

// Replayed reports whether the response is that of an earlier attempt.
func Replayed(response *http.Response) bool {
	return response.Header.Get("Idempotency-Replayed") == "true"
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	if !slices.Contains(t.cfg.Methods, request.Method) {
		return t.base.RoundTrip(request)
	}
	ctx := request.Context()
	body, again, err := t.body(request)
	if err != nil {
		return nil, fmt.Errorf("read body: %w", err)
	}
	template := request.Clone(ctx)
	if template.Header.Get(t.cfg.Header) == "" {
		key, ok := ctx.Value(keyKey{}).(string)
		if !ok {
			key = NewKey()
		}
		template.Header.Set(t.cfg.Header, quote(key))
	}
	for attempt := 1; ; attempt++ {
		r := template.Clone(ctx)
		r.GetBody = body
		if body != nil {
			if r.Body, err = body(); err != nil {
				return nil, fmt.Errorf("read body again: %w", err)
			}
		}
		response, err := t.base.RoundTrip(r)
		if attempt == t.cfg.Attempts || !again || ctx.Err() != nil {
			return response, err
		}
		pause := t.cfg.Pause + rand.N(t.cfg.Pause/4+1) //nolint:gosec // no secret
		if err == nil {
			retry, asked, readErr := worthRetrying(response)
			if readErr != nil {
				err = readErr
			} else if !retry || asked > t.cfg.MaxPause {
				return response, nil
			} else if asked >= 0 {
				pause = asked
			}
			if err == nil {
				drain(response.Body)
			}
		}
		if !sleep.For(ctx, pause) {
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// quote makes an RFC 9651 string of a key, unless it already is one.
func quote(key string) string {
	if strings.HasPrefix(key, `"`) {
		return key
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
}

// body returns a function that opens the body anew for each attempt; nil if there is no
// body. again is false if only one attempt is possible.
func (t *Transport) body(request *http.Request) (body func() (io.ReadCloser, error), again bool, err error) {
	switch {
	case request.Body == nil || request.Body == http.NoBody:
		return nil, true, nil
	case request.GetBody != nil:
		return request.GetBody, true, request.Body.Close()
	}
	read, err := io.ReadAll(io.LimitReader(request.Body, t.cfg.MaxBody+1))
	if err != nil {
		return nil, false, errors.Join(err, request.Body.Close())
	}
	if int64(len(read)) > t.cfg.MaxBody {
		rest := request.Body
		return func() (io.ReadCloser, error) {
			return struct {
				io.Reader
				io.Closer
			}{io.MultiReader(bytes.NewReader(read), rest), rest}, nil
		}, false, nil
	}
	return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(read)), nil }, true, request.Body.Close()
}

// worthRetrying reads as much of a response as it needs. asked is the value of
// Retry-After, or -1.
func worthRetrying(response *http.Response) (retry bool, asked time.Duration, err error) {
	asked = retryAfter(response.Header.Get("Retry-After"))
	switch response.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true, asked, nil
	case http.StatusAccepted, http.StatusConflict:
	default:
		return false, asked, nil
	}
	if Replayed(response) {
		return false, asked, nil // the handler's own answer
	}
	byHeader := asked >= 0 && response.StatusCode == http.StatusConflict
	contentType, _, mediaErr := mime.ParseMediaType(response.Header.Get("Content-Type"))
	if mediaErr != nil || contentType != "application/problem+json" {
		return byHeader, asked, nil //nolint:nilerr // no problem document: the header decides
	}
	const most = 64 << 10
	text, err := io.ReadAll(io.LimitReader(response.Body, most))
	if err != nil {
		drain(response.Body)
		return false, asked, err
	}
	rest := response.Body
	response.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(text), rest), rest}
	var problem struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(text, &problem) != nil {
		return byHeader, asked, nil //nolint:nilerr // the header decides
	}
	return strings.HasSuffix(problem.Type, "in-progress"), asked, nil
}

// drain reads the rest of a body, so that the connection can be reused.
func drain(body io.ReadCloser) {
	_, _ = io.Copy(io.Discard, io.LimitReader(body, 64<<10)) // its errors do not matter
	_ = body.Close()
}

// retryAfter parses seconds or a date; -1 for neither.
func retryAfter(value string) time.Duration {
	if n, err := strconv.Atoi(value); err == nil && n >= 0 && n < 1<<31 {
		return time.Duration(n) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(0, time.Until(at))
	}
	return -1
}
