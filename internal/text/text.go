// Package text checks, shortens and encodes what users and producers write.
package text

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Check returns why a database cannot store s, or a column of limit bytes cannot; "" if
// it can.
func Check(s string, limit int) (problem string) {
	switch {
	case len(s) > limit:
		return fmt.Sprintf("has %d bytes; at most %d are allowed", len(s), limit)
	case strings.IndexByte(s, 0) >= 0:
		return "holds a NUL byte"
	case !utf8.ValidString(s):
		return "is not valid UTF-8"
	}
	return ""
}

// Shorten makes foreign text suitable for an error message: short, valid UTF-8.
func Shorten(s string) string {
	const limit = 64
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}

// Quote returns a name that strangers may have chosen in quotes, shortened to a number of
// characters.
func Quote(name string, most int) string {
	if runes := []rune(name); len(runes) > most {
		name = string(runes[:most]) + "…"
	}
	return strconv.Quote(name)
}

// Clean makes s acceptable to every database: valid UTF-8 without NUL, cut at 4 KiB with a
// mark.
func Clean(s string) string {
	const limit = 4 << 10
	cut := len(s) > limit
	if cut {
		s = s[:limit]
	}
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) > limit { // a replacement is longer than what it replaces
		cut, s = true, strings.ToValidUTF8(s[:limit], "")
	}
	if cut {
		s += "…"
	}
	return s
}

// JSON encodes v without escapes for HTML.
func JSON(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), err
}
