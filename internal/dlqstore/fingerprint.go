package dlqstore

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Fingerprint returns 16 hexadecimal digits that are the same for similar failures: of the
// same origin ("relay", or the name of a consumer), of the same class, with the same text
// apart from what differs from message to message. That is every occurrence of one of own
// (the id of the message, for example) that is not part of a longer word, and every word that
// contains a digit.
func Fingerprint(origin, class, text string, own ...string) string {
	for _, s := range own {
		if s != "" {
			text = blank(text, s)
		}
	}
	words := strings.FieldsFunc(text, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '#' && r != '_' && r != '-'
	})
	hash := sha256.New()
	for _, part := range []string{origin, class} {
		hash.Write([]byte(part + "\x00"))
	}
	for _, word := range words {
		if strings.ContainsFunc(word, unicode.IsDigit) {
			word = "#"
		}
		hash.Write([]byte(word + " "))
	}
	return hex.EncodeToString(hash.Sum(nil)[:8])
}

// blank replaces own by # where it stands alone. An id may be as short as a letter.
func blank(text, own string) string {
	inWord := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }
	var out strings.Builder
	done := 0 // of text
	for at := 0; ; {
		i := strings.Index(text[at:], own)
		if i < 0 {
			out.WriteString(text[done:])
			return out.String()
		}
		i += at
		before, _ := utf8.DecodeLastRuneInString(text[:i])
		after, _ := utf8.DecodeRuneInString(text[i+len(own):])
		if inWord(before) || inWord(after) {
			at = i + 1
			continue
		}
		out.WriteString(text[done:i] + "#")
		at, done = i+len(own), i+len(own)
	}
}
