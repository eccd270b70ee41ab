package idempotency

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxJSONDepth keeps a nested body from using up the stack.
const maxJSONDepth = 512

// CanonicalJSON returns body without insignificant white space, with the names
// of each object sorted and with strings escaped in one way. Nothing else is
// changed: a number keeps its digits, so 9007199254740993 is not
// 9007199254740992, and 1.0 is not 1. It reports false, and then the bytes as they
// are have to be compared, for what has no lossless canonical form: text that is
// not JSON or not UTF-8, an object that has a name twice, half of a surrogate
// pair, nesting deeper than 512.
func CanonicalJSON(body []byte) ([]byte, bool) {
	if !utf8.Valid(body) || !json.Valid(body) {
		return nil, false
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	c := canonicalizer{decoder: decoder}
	out, ok := c.value(make([]byte, 0, len(body)), 0)
	return out, ok
}

type canonicalizer struct{ decoder *json.Decoder }

// value appends the next value.
func (c canonicalizer) value(out []byte, depth int) ([]byte, bool) {
	token, err := c.decoder.Token()
	if err != nil || depth > maxJSONDepth {
		return nil, false
	}
	switch v := token.(type) {
	case json.Delim:
		if v == '{' {
			return c.object(out, depth)
		}
		return c.array(out, depth)
	case string:
		return appendString(out, v)
	case json.Number:
		return append(out, v...), true
	case bool:
		if v {
			return append(out, "true"...), true
		}
		return append(out, "false"...), true
	default:
		return append(out, "null"...), true
	}
}

func (c canonicalizer) array(out []byte, depth int) ([]byte, bool) {
	out = append(out, '[')
	for first := true; c.decoder.More(); first = false {
		if !first {
			out = append(out, ',')
		}
		var ok bool
		if out, ok = c.value(out, depth+1); !ok {
			return nil, false
		}
	}
	_, err := c.decoder.Token()
	return append(out, ']'), err == nil
}

type member struct {
	name  string
	value []byte
}

func (c canonicalizer) object(out []byte, depth int) ([]byte, bool) {
	var members []member
	for c.decoder.More() {
		token, err := c.decoder.Token()
		name, isString := token.(string)
		if err != nil || !isString {
			return nil, false
		}
		value, ok := c.value(nil, depth+1)
		if !ok {
			return nil, false
		}
		members = append(members, member{name, value})
	}
	if _, err := c.decoder.Token(); err != nil {
		return nil, false
	}
	slices.SortFunc(members, func(a, b member) int { return strings.Compare(a.name, b.name) })
	out = append(out, '{')
	for i, m := range members {
		if i > 0 {
			if m.name == members[i-1].name {
				return nil, false
			}
			out = append(out, ',')
		}
		var ok bool
		if out, ok = appendString(out, m.name); !ok {
			return nil, false
		}
		out = append(append(out, ':'), m.value...)
	}
	return append(out, '}'), true
}

// appendString refuses U+FFFD: the decoder puts it in the place of half a
// surrogate pair, of which there are many.
func appendString(out []byte, s string) ([]byte, bool) {
	if strings.ContainsRune(s, utf8.RuneError) {
		return nil, false
	}
	const hex = "0123456789abcdef"
	out = append(out, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			out = append(out, '\\', c)
		case c < 0x20:
			out = append(out, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			out = append(out, c)
		}
	}
	return append(out, '"'), true
}
