package outboxstore

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// DecodeMetadata decodes the metadata of a row.
func DecodeMetadata(encoded []byte) (message.Metadata, error) {
	if metadata, ok := decodePlain(string(encoded)); ok {
		return metadata, nil
	}
	metadata := message.Metadata{}
	if err := json.Unmarshal(encoded, (*map[string]string)(&metadata)); err != nil {
		return nil, fmt.Errorf("outbox: metadata of the row: %w", err)
	}
	return metadata, nil
}

// decodePlain decodes an object of strings in our encoder's format that contains
// nothing to unescape. json.Unmarshal takes ten times as long, and decodes everything
// else.
func decodePlain(s string) (metadata message.Metadata, ok bool) {
	metadata = message.Metadata{}
	if s == "" {
		return metadata, true
	}
	rest, ok := strings.CutPrefix(s, `{"`)
	if !ok || !utf8.ValidString(rest) {
		return nil, false
	}
	for {
		name, after, found := strings.Cut(rest, `":"`)
		value, next, closed := strings.Cut(after, `"`)
		if !found || !closed || !plain(name) || !plain(value) {
			return nil, false
		}
		metadata[name] = value
		if next == "}" {
			return metadata, true
		}
		if rest, ok = strings.CutPrefix(next, `,"`); !ok {
			return nil, false
		}
	}
}

// plain reports whether s appears in JSON without escapes.
func plain(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] == '"' || s[i] == '\\' {
			return false
		}
	}
	return true
}
