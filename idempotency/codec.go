package idempotency

import (
	"bytes"
	"compress/flate"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/secret"
)

// Encryption encrypts stored responses, and their Location and resource ids, with AES-GCM.
// Correlation ids are not stored then. Each response is stored with the id of the key that
// encrypted it, so keys can be rotated: add the new key, make it current, and remove the
// old one when everything that it encrypted has expired.
type Encryption struct {
	// Current is the id of the key to encrypt with, 1 to 32 bytes.
	Current string

	// Keys holds the keys by id; each key has 16, 24 or 32 bytes.
	Keys map[string]oncemill.Secret

	// AcceptPlain permits the replay of responses that were stored without encryption, while
	// encryption is being introduced. Meanwhile, whatever can write to the table or the cache
	// can forge responses. Default: false; they are refused with [ErrNotEncrypted].
	AcceptPlain bool
}

// codec converts responses to and from their stored form: a byte of flags, the key's id if
// encrypted, and the content, first compressed, then encrypted. The record that a response
// belongs to (its key, caller and request) is authenticated with it, so that it is valid
// for no other record.
type codec struct {
	compressAbove int // 0: never
	acceptPlain   bool
	current       string
	ciphers       map[string]func() cipher.AEAD // functions, because fmt does not print what they hold
}

const (
	flagCompressed = 1 << iota
	flagEncrypted
)

func newCodec(compressAbove int, e *Encryption) (codec, error) {
	c := codec{compressAbove: compressAbove}
	if e == nil {
		return c, nil
	}
	bad := func(field, value, problem string) error {
		return badValue("Responses.Encryption."+field, value, problem)
	}
	c.current, c.ciphers, c.acceptPlain = e.Current, map[string]func() cipher.AEAD{}, e.AcceptPlain
	for id, key := range e.Keys {
		if id == "" || len(id) > 32 {
			return c, bad("Keys", strconv.Quote(id), "an id has 1 to 32 bytes")
		}
		block, err := aes.NewCipher(secret.Bytes(key))
		if err != nil {
			return c, bad("Keys", strconv.Quote(id), "a key has 16, 24 or 32 bytes")
		}
		gcm, err := cipher.NewGCM(block)
		if err != nil {
			return c, bad("Keys", strconv.Quote(id), err.Error())
		}
		c.ciphers[id] = func() cipher.AEAD { return gcm }
	}
	if c.ciphers[e.Current] == nil {
		return c, bad("Current", strconv.Quote(e.Current), "must be the id of one of Keys")
	}
	return c, nil
}

// binding identifies the record that a response belongs to.
type binding []byte

func bind(id ID, caller Caller, fingerprint Fingerprint) binding {
	return slices.Concat(id[:], caller[:], fingerprint[:]) // of fixed lengths
}

func (r *Record) binding() binding { return bind(r.ID, r.Caller, r.Fingerprint) }
func (c *Claim) binding() binding  { return bind(c.ID, c.Caller, c.Fingerprint) }

func (c codec) encode(of binding, content []byte) ([]byte, error) {
	head := []byte{0}
	if c.compressAbove > 0 && len(content) > c.compressAbove {
		var b bytes.Buffer
		w, err := flate.NewWriter(&b, flate.BestSpeed)
		if err != nil {
			return nil, fmt.Errorf("compress: %w", err)
		}
		if _, err := w.Write(content); err != nil {
			return nil, fmt.Errorf("compress: %w", err)
		}
		if err := w.Close(); err != nil {
			return nil, fmt.Errorf("compress: %w", err)
		}
		if b.Len() < len(content) {
			head[0] |= flagCompressed
			content = b.Bytes()
		}
	}
	if c.ciphers == nil {
		return append(head, content...), nil
	}
	return c.seal(of, "", head[0], content), nil
}

// seal encrypts content under a label.
func (c codec) seal(of binding, label string, flags byte, content []byte) []byte {
	gcm := c.ciphers[c.current]()
	head := append([]byte{flags | flagEncrypted, byte(len(c.current))}, c.current...)
	nonce := make([]byte, gcm.NonceSize())
	rand.Read(nonce)
	out := append(bytes.Clone(head), nonce...)
	return gcm.Seal(out, nonce, content, slices.Concat(head, of, []byte(label)))
}

// unseal decrypts the output of seal.
func (c codec) unseal(of binding, label string, stored []byte) ([]byte, error) {
	if len(stored) < 2 || len(stored) < 2+int(stored[1]) {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	size := 2 + int(stored[1])
	key := c.ciphers[string(stored[2:size])]
	if key == nil {
		return nil, fmt.Errorf("%w: there is no key with its id", ErrDecode)
	}
	gcm := key()
	head, sealed := stored[:size], stored[size:]
	if len(sealed) < gcm.NonceSize() {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	content, err := gcm.Open(nil, sealed[:gcm.NonceSize()], sealed[gcm.NonceSize():], slices.Concat(head, of, []byte(label)))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDecode, err)
	}
	return content, nil
}

// sealedText is the prefix of an encrypted text in a column of its own.
const sealedText = "sealed:"

// encodeText encrypts a text if encryption is on.
func (c codec) encodeText(of binding, label, text string) string {
	if c.ciphers == nil || text == "" {
		return text
	}
	return sealedText + base64.RawURLEncoding.EncodeToString(c.seal(of, label, 0, []byte(text)))
}

// decodeText returns "" for a text that cannot be trusted.
func (c codec) decodeText(of binding, label, stored string) string {
	text, sealed := strings.CutPrefix(stored, sealedText)
	if c.ciphers == nil || !sealed && c.acceptPlain {
		return stored
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil {
		raw, err = c.unseal(of, label, raw)
	}
	if err != nil || !sealed {
		return ""
	}
	return string(raw)
}

func (c codec) decode(of binding, stored []byte) ([]byte, error) {
	if len(stored) == 0 {
		return nil, fmt.Errorf("%w: it is empty", ErrDecode)
	}
	flags, content := stored[0], stored[1:]
	switch {
	case flags&flagEncrypted != 0:
		var err error
		if content, err = c.unseal(of, "", stored); err != nil {
			return nil, err
		}
	case c.ciphers != nil && !c.acceptPlain:
		return nil, ErrNotEncrypted
	}
	if flags&flagCompressed == 0 {
		return content, nil
	}
	plain, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(content)), mostStored+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrDecode, err)
	case len(plain) > mostStored:
		return nil, fmt.Errorf("%w: it is larger than any that is stored", ErrDecode)
	}
	return plain, nil
}

// mostResponse is the largest body that can be stored.
const mostResponse = 64 << 20

// mostStored bounds the decompressed size of a stored response: the largest body that
// Config.Responses.MaxSize allows, and headers.
const mostStored = mostResponse + 16<<20
