package oncemill

import "github.com/oncemill/oncemill/internal/secret"

// Secret is a key for encryption, signatures or hashes. It is never printed: not by any verb of
// package fmt, even inside another value, nor by a logger or an encoder, which show "[secret]".
// The zero value is no key. It can be copied and used concurrently.
type Secret = secret.Secret

// NewSecret returns a Secret with a copy of key. Generate keys with crypto/rand; the field that
// takes a Secret says how long it must be.
func NewSecret(key []byte) Secret { return secret.New(key) }
