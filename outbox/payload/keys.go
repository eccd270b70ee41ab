package payload

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/secret"
	"github.com/oncemill/oncemill/internal/text"
)

// Keys are the keys of one purpose. The zero value has none.
type Keys struct {
	// Current is the id of the key that Encode uses. Default: none; Encode does not use
	// keys, Decode uses Secrets.
	Current string

	// Secrets holds the keys by id: the current one and those that Decode still needs.
	// Each message contains the id of its key. An id has 1 to 64 characters of A-Z, a-z,
	// 0-9, point, underscore and hyphen. Never reuse an id for another key.
	Secrets map[string]oncemill.Secret
}

var keyIDPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// check reports the problems of k as a field of Config.
func (k Keys) check(field string, fits func(key []byte) (problem string), bad func(field, value, problem string)) {
	for _, id := range slices.Sorted(maps.Keys(k.Secrets)) {
		key := secret.Bytes(k.Secrets[id])
		name := field + ".Secrets[" + strconv.Quote(text.Shorten(id)) + "]"
		if !keyIDPattern.MatchString(id) {
			bad(name, "id", "must be 1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-'")
		}
		problem := fits(key)
		if problem == "" && len(bytes.Trim(key, "\x00")) == 0 {
			problem = "must not be all zero; take it from crypto/rand"
		}
		if problem != "" {
			bad(name, secret.Hidden, problem)
		}
	}
	if _, ok := k.Secrets[k.Current]; k.Current != "" && !ok {
		bad(field+".Current", strconv.Quote(text.Shorten(k.Current)), "must be the id of one of Secrets, or empty")
	}
}

func fitsEncryption(key []byte) (problem string) {
	if len(key) != 32 {
		return fmt.Sprintf("has %d bytes; AES-256 takes 32", len(key))
	}
	return ""
}

func fitsSignature(key []byte) (problem string) {
	// RFC 2104, section 3, discourages keys shorter than the hash.
	if len(key) < 32 {
		return fmt.Sprintf("has %d bytes; at least 32 are needed", len(key))
	}
	return ""
}

// common returns the ids of a key that both a and b contain.
func common(a, b Keys) (idA, idB string, found bool) {
	for idA, secretA := range a.Secrets {
		for idB, secretB := range b.Secrets {
			if key := secret.Bytes(secretA); len(key) > 0 && bytes.Equal(key, secret.Bytes(secretB)) {
				return idA, idB, true
			}
		}
	}
	return "", "", false
}

// ring holds the prepared keys of one purpose.
type ring[K any] struct {
	current string
	keys    map[string]K
}

func newRing[K any](keys Keys, ready func(key []byte) (K, error)) (ring[K], error) {
	r := ring[K]{current: keys.Current, keys: make(map[string]K, len(keys.Secrets))}
	for id, s := range keys.Secrets {
		key, err := ready(secret.Bytes(s))
		if err != nil {
			return r, err
		}
		r.keys[id] = key
	}
	return r, nil
}

// find returns the key with the id of a message.
func (r ring[K]) find(id string) (K, error) {
	key, ok := r.keys[id]
	if !ok {
		return key, detailed(ErrUnknownKey, "id %q", text.Shorten(id))
	}
	return key, nil
}

// newAEAD returns AES-256-GCM with a random nonce in front of each ciphertext.
func newAEAD(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}
