package idempotency

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/textproto"
	"slices"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// Answer is the stored answer of a key.
type Answer struct {
	Status int         // 0: of a command
	Header http.Header // what the handler has set
	Body   []byte
}

// answer returns a copy of a response.
func (res *response) answer() Answer {
	a := Answer{Status: res.Status, Header: http.Header{}, Body: bytes.Clone(res.body)}
	for _, e := range res.Header {
		a.Header[e.Name] = stringsOf(e.Values)
	}
	return a
}

// kept returns a response without the headers that are not to be stored.
func (c *core) kept(res *response) response {
	kept := *res
	out := func(e headerEntry) bool {
		return slices.Contains(c.cfg.Responses.DropHeaders, e.Name) ||
			len(c.cfg.Responses.KeepHeaders) > 0 && !slices.Contains(c.cfg.Responses.KeepHeaders, e.Name)
	}
	kept.Header = slices.DeleteFunc(slices.Clone(res.Header), out)
	kept.Trailer = slices.DeleteFunc(slices.Clone(res.Trailer), out)
	return kept
}

// redacted returns what Config.Responses.Redact leaves of a response.
func (x *exchange) redacted(res *response) (*response, error) {
	if x.cfg.Responses.Redact == nil {
		return res, nil
	}
	kept := x.kept(res)
	kept.Trailer = nil // it is not shown
	before, after := kept.answer(), kept.answer()
	if err := nopanic.Call(func() error { return x.cfg.Responses.Redact(x.r, &after) }); err != nil {
		return nil, err
	}
	if len(after.Body) > x.cfg.Responses.MaxSize {
		return nil, fmt.Errorf("the redacted body has %d bytes; at most %d are stored", len(after.Body), x.cfg.Responses.MaxSize)
	}
	if kept.body = after.Body; !hasBody(kept.Status) {
		kept.body = nil
	}
	set := http.Header{}
	for name, values := range after.Header {
		name = textproto.CanonicalMIMEHeaderKey(name)
		set[name] = append(set[name], values...)
	}
	// What was left as it was stays an addition to outer headers, if it was one.
	kept.Header = slices.DeleteFunc(kept.Header, func(e headerEntry) bool { return !slices.Equal(set[e.Name], before.Header[e.Name]) })
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if !slices.Equal(set[name], before.Header[name]) && !slices.Contains(perAnswer, name) && isHeaderName(name) {
			kept.Header = append(kept.Header, headerEntry{Name: name, Values: bytesOf(set[name])})
		}
	}
	return &kept, nil
}
