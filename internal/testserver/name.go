package testserver

import (
	"crypto/rand"
	"encoding/hex"
	"strings"
	"testing"
)

// uniqueName returns a name of at most 24 characters (a-z, 0-9 and _). No other test on any
// machine has it, and it shows which test it belongs to.
func uniqueName(t testing.TB) string {
	name := strings.TrimPrefix(strings.ToLower(t.Name()), "test")
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, name)
	if len(name) > 13 {
		name = name[:13]
	}
	var random [5]byte
	rand.Read(random[:])
	return strings.Trim(name, "_") + "_" + hex.EncodeToString(random[:])
}
