package dlqstore

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode"
)

// Fingerprint returns 16 hexadecimal digits that are the same for similar failures: of the
// same origin ("relay", or the name of a consumer), of the same class, with the same text
// apart from what differs from message to message. That is every occurrence of one of own
// (the id of the message, for example), and every word that contains a digit.
func Fingerprint(origin, class, text string, own ...string) string {
	for _, s := range own {
		if s != "" {
			text = strings.ReplaceAll(text, s, "#")
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
