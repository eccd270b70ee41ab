package idempotency

import (
	"bytes"
	"compress/flate"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"strconv"

	"github.com/oncemill/oncemill"
)

// Encryption encrypts stored responses with AES-GCM. The id of the key that
// encrypted a response is stored with it, so keys can be changed: add the new one,
// make it current, and take the old one away when all that it encrypted has
// expired.
type Encryption struct {
	// Current is the id of the key that encrypts, 1 to 32 bytes.
	Current string

	// Keys holds the keys by id; each has 16, 24 or 32 bytes.
	Keys map[string][]byte
}

// codec turns responses into what is stored, and back: a byte of flags, the key's
// id where encrypted, and the content, first compressed, then encrypted. What a
// response is encrypted for (its record) is authenticated with it, so that rows
// cannot be exchanged.
type codec struct {
	compressAbove int // 0: never
	current       string
	ciphers       map[string]cipher.AEAD
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
		return &oncemill.ConfigError{Field: "idempotency.Config.Encryption." + field, Value: value, Problem: problem}
	}
	c.current, c.ciphers = e.Current, map[string]cipher.AEAD{}
	for id, key := range e.Keys {
		if id == "" || len(id) > 32 {
			return c, bad("Keys", strconv.Quote(id), "an id has 1 to 32 bytes")
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return c, bad("Keys", strconv.Quote(id), "a key has 16, 24 or 32 bytes")
		}
		if c.ciphers[id], err = cipher.NewGCM(block); err != nil {
			return c, bad("Keys", strconv.Quote(id), err.Error())
		}
	}
	if c.ciphers[e.Current] == nil {
		return c, bad("Current", strconv.Quote(e.Current), "must be the id of one of Keys")
	}
	return c, nil
}

func (c codec) encode(id ID, content []byte) ([]byte, error) {
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
	gcm := c.ciphers[c.current]
	head[0] |= flagEncrypted
	head = append(append(head, byte(len(c.current))), c.current...)
	nonce := make([]byte, gcm.NonceSize())
	rand.Read(nonce)
	out := append(bytes.Clone(head), nonce...)
	return gcm.Seal(out, nonce, content, append(head, id[:]...)), nil
}

func (c codec) decode(id ID, stored []byte) ([]byte, error) {
	if len(stored) == 0 {
		return nil, fmt.Errorf("%w: it is empty", ErrDecode)
	}
	flags, content := stored[0], stored[1:]
	if flags&flagEncrypted != 0 {
		if len(content) < 1 || len(content) < 1+int(content[0]) {
			return nil, fmt.Errorf("%w: it is too short", ErrDecode)
		}
		size := 2 + int(content[0])
		gcm := c.ciphers[string(stored[2:size])]
		if gcm == nil {
			return nil, fmt.Errorf("%w: there is no key with its id", ErrDecode)
		}
		head, sealed := stored[:size:size], stored[size:]
		if len(sealed) < gcm.NonceSize() {
			return nil, fmt.Errorf("%w: it is too short", ErrDecode)
		}
		var err error
		content, err = gcm.Open(nil, sealed[:gcm.NonceSize()], sealed[gcm.NonceSize():], append(head, id[:]...))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrDecode, err)
		}
	}
	if flags&flagCompressed == 0 {
		return content, nil
	}
	plain, err := io.ReadAll(flate.NewReader(bytes.NewReader(content)))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDecode, err)
	}
	return plain, nil
}

// response is what a handler answered, as it is stored.
type response struct {
	Status   int           `json:"s"`
	Header   []headerEntry `json:"h,omitempty"`
	Trailer  []headerEntry `json:"t,omitempty"`
	Pointer  bool          `json:"p,omitempty"` // the body was left out on purpose
	body     []byte
	overflow bool // the body is not all of it
}

// headerEntry says what a handler did to a header that it may have found set.
type headerEntry struct {
	Name   string   `json:"n"`
	Values []string `json:"v,omitempty"`
	Add    bool     `json:"a,omitempty"` // behind the values that were there; else in their place
}

// marshal puts the JSON of the head before the body, with its length.
func (res *response) marshal() ([]byte, error) {
	head, err := json.Marshal(res)
	if err != nil {
		return nil, fmt.Errorf("encode response: %w", err)
	}
	out := make([]byte, 0, 4+len(head)+len(res.body))
	out = binary.BigEndian.AppendUint32(out, uint32(len(head))) //nolint:gosec // headers are far below 4 GiB
	return append(append(out, head...), res.body...), nil
}

func unmarshalResponse(stored []byte) (*response, error) {
	if len(stored) < 4 {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	size := int(binary.BigEndian.Uint32(stored))
	if size < 0 || len(stored)-4 < size {
		return nil, fmt.Errorf("%w: it is too short", ErrDecode)
	}
	var r response
	if err := json.Unmarshal(stored[4:4+size], &r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDecode, err)
	}
	r.body = stored[4+size:]
	return &r, nil
}
