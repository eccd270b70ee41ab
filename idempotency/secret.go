package idempotency

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
)

// Secret is a key that is never printed: not by any verb of package fmt, even inside
// another value, nor by a logger or an encoder. The zero value is no key.
type Secret struct {
	key func() []byte // fmt prints fields where it is asked for a verb that they do not have
}

// NewSecret returns a Secret with a copy of key.
func NewSecret(key []byte) Secret {
	key = bytes.Clone(key)
	return Secret{func() []byte { return key }}
}

func (s Secret) bytes() []byte {
	if s.key == nil {
		return nil
	}
	return s.key()
}

const redacted = "REDACTED"

// Format implements fmt.Formatter.
func (Secret) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, redacted) } // as fmt does

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }
