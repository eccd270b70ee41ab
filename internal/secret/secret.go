// Package secret holds keys that are never printed. Its type is oncemill.Secret for users; only
// packages of oncemill can read the bytes, by [Bytes].
package secret

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
)

// Secret is a key that is never printed: not by any verb of package fmt, even inside another
// value, nor by a logger or an encoder. The zero value is no key.
type Secret struct {
	key func() []byte // fmt prints fields where it is asked for a verb that they do not have
}

// New returns a Secret with a copy of key.
func New(key []byte) Secret {
	key = bytes.Clone(key)
	return Secret{func() []byte { return key }}
}

// Bytes returns the key, which must not be changed; nil for the zero Secret.
func Bytes(s Secret) []byte {
	if s.key == nil {
		return nil
	}
	return s.key()
}

// Hidden stands in place of a secret wherever one would be shown.
const Hidden = "[secret]"

// Format implements fmt.Formatter.
func (Secret) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, Hidden) } // as fmt does

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(Hidden) }

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(Hidden), nil }
