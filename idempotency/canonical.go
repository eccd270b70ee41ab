package idempotency

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"unicode/utf8"
)

// maxJSONDepth bounds the work of sorting: each level may move everything below it.
const maxJSONDepth = 128

// CanonicalJSON returns body without insignificant white space, with the names of each
// object sorted and with strings escaped in one way. Nothing else is changed: a number
// keeps its digits, so 9007199254740993 is not 9007199254740992, and 1.0 is not 1. It
// returns false if there is no lossless canonical form; then compare the original bytes.
// There is none for text that is not JSON or not UTF-8, an object that has a name twice,
// half of a surrogate pair, or nesting deeper than 128.
func CanonicalJSON(body []byte) ([]byte, bool) {
	if !utf8.Valid(body) || !json.Valid(body) {
		return nil, false
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	c := canonicalizer{decoder: decoder, out: make([]byte, 0, len(body))}
	if !c.value(0) {
		return nil, false
	}
	return c.out, true
}

// canonicalizer appends to out, and sorts in place.
type canonicalizer struct {
	decoder *json.Decoder
	out     []byte
	spare   []byte
}

// value appends the next value.
func (c *canonicalizer) value(depth int) bool {
	token, err := c.decoder.Token()
	if err != nil || depth > maxJSONDepth {
		return false
	}
	switch v := token.(type) {
	case json.Delim:
		if v == '{' {
			return c.object(depth)
		}
		return c.array(depth)
	case string:
		return c.text(v)
	case json.Number:
		c.out = append(c.out, v...)
	case bool:
		if v {
			c.out = append(c.out, "true"...)
		} else {
			c.out = append(c.out, "false"...)
		}
	default:
		c.out = append(c.out, "null"...)
	}
	return true
}

func (c *canonicalizer) array(depth int) bool {
	c.out = append(c.out, '[')
	for first := true; c.decoder.More(); first = false {
		if !first {
			c.out = append(c.out, ',')
		}
		if !c.value(depth + 1) {
			return false
		}
	}
	_, err := c.decoder.Token()
	c.out = append(c.out, ']')
	return err == nil
}

// member is a name and its value, and their position in the output.
type member struct {
	name     string
	from, to int
}

func compareNames(a, b member) int { return strings.Compare(a.name, b.name) }

func (c *canonicalizer) object(depth int) bool {
	c.out = append(c.out, '{')
	begin := len(c.out)
	var members []member
	for c.decoder.More() {
		token, err := c.decoder.Token()
		name, isString := token.(string)
		if err != nil || !isString {
			return false
		}
		m := member{name: name, from: len(c.out)}
		if !c.text(name) {
			return false
		}
		c.out = append(c.out, ':')
		if !c.value(depth + 1) {
			return false
		}
		m.to = len(c.out)
		c.out = append(c.out, ',')
		members = append(members, m)
	}
	if _, err := c.decoder.Token(); err != nil {
		return false
	}
	if !slices.IsSortedFunc(members, compareNames) {
		slices.SortFunc(members, compareNames)
		c.spare = append(c.spare[:0], c.out[begin:]...)
		sorted := c.out[:begin]
		for _, m := range members {
			sorted = append(append(sorted, c.spare[m.from-begin:m.to-begin]...), ',')
		}
	}
	for i := 1; i < len(members); i++ {
		if members[i].name == members[i-1].name {
			return false
		}
	}
	if len(members) > 0 {
		c.out = c.out[:len(c.out)-1] // the last comma
	}
	c.out = append(c.out, '}')
	return true
}

// text appends a string. It refuses U+FFFD, because the decoder replaces half a surrogate
// pair with it, and there are many different halves.
func (c *canonicalizer) text(s string) bool {
	if strings.ContainsRune(s, utf8.RuneError) {
		return false
	}
	const hex = "0123456789abcdef"
	out := append(c.out, '"')
	for i := range len(s) {
		switch b := s[i]; {
		case b == '"' || b == '\\':
			out = append(out, '\\', b)
		case b < 0x20:
			out = append(out, '\\', 'u', '0', '0', hex[b>>4], hex[b&15])
		default:
			out = append(out, b)
		}
	}
	c.out = append(out, '"')
	return true
}
