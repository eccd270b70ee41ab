package payload

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/secret"
	"github.com/oncemill/oncemill/internal/text"
)

// Config configures a Codec. The zero value encodes nothing, and decodes compressed
// payloads. Producers and consumers may have different configurations: a message carries the
// steps that were applied to it.
type Config struct {
	// CompressFrom is the smallest size in bytes of payloads to compress. A payload that
	// would not become smaller stays as it is. Default: 0, never. A kilobyte of JSON takes
	// some 10 µs and shrinks to a third. Read the package's comment before you both
	// compress and encrypt.
	CompressFrom int

	// Encryption holds the keys for AES-256-GCM, 32 bytes each. Encryption adds 28 bytes
	// to a payload.
	Encryption Keys

	// RequireEncryption makes Decode refuse payloads that are not encrypted, with
	// ErrUnencrypted. Encode fails without a current key.
	RequireEncryption bool

	// Store keeps payloads that are too large for a message. Producers and consumers need
	// the same Store. Default: none.
	Store Store

	// StoreFrom is the smallest size in bytes, after compression and encryption, of
	// payloads to store in the Store. Default: 256 KiB. A higher value sends more through
	// the database and the broker. It must be below outbox.Config.MaxPayload.
	StoreFrom int

	// StoreTimeout bounds each call of the Store. Default: 10 s. Encode calls the Store
	// while the caller's transaction is open and holds its locks.
	StoreTimeout time.Duration

	// Signature holds the keys for HMAC-SHA256, at least 32 bytes each. With keys, Decode
	// refuses wrong signatures. Without keys it ignores signatures.
	Signature Keys

	// RequireSignature makes Decode refuse messages that are not signed, with ErrUnsigned.
	// Encode fails without a current key.
	RequireSignature bool

	// SignedMetadata names metadata that the signature also covers, for example "name",
	// the type of the payload in Watermill's CQRS. With RequireSignature, Decode refuses
	// a signature that covers fewer names. At most 16 names, each of 1 to 128 characters
	// of A-Z, a-z, 0-9 and . _ : - that do not begin with oncemill_.
	SignedMetadata []string

	// Topic reports whether a consumer that is subscribed to the first topic accepts
	// messages that were published to the second, for brokers with patterns. Default:
	// only if they are equal.
	Topic func(subscribed, published string) bool

	// MaxSize is the largest plain payload in bytes, for Encode, and for Decode of
	// compressed and stored payloads. Default: 64 MiB. At most 1 GiB. Decoding a message
	// takes up to three times as much memory.
	MaxSize int
}

const (
	prefix      = "oncemill_"
	maxSigned   = 16
	mostMaxSize = 1 << 30
)

var metadataNamePattern = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)

// New returns a codec. It does no I/O. It reports all bad values of cfg at once, each as an
// [*oncemill.ConfigError]. No error shows a key.
func New(cfg Config) (*Codec, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "payload.Config." + field, Value: value, Problem: problem})
	}
	if cfg.CompressFrom < 0 {
		bad("CompressFrom", strconv.Itoa(cfg.CompressFrom), "must not be negative; 0 compresses nothing")
	}
	cfg.checkKeys(bad)
	cfg.checkSignedMetadata(bad)
	cfg.fillStore(bad)
	switch {
	case cfg.MaxSize == 0:
		cfg.MaxSize = 64 << 20
	case cfg.MaxSize < 0 || cfg.MaxSize > mostMaxSize:
		bad("MaxSize", strconv.Itoa(cfg.MaxSize), "must be 1 to "+strconv.Itoa(mostMaxSize)+" bytes, or 0 for 64 MiB")
	}
	if cfg.Topic == nil {
		cfg.Topic = func(subscribed, published string) bool { return subscribed == published }
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	c := &Codec{
		compressFrom: cfg.CompressFrom, requireEncryption: cfg.RequireEncryption,
		store: cfg.Store, storeFrom: cfg.StoreFrom, storeTimeout: cfg.StoreTimeout,
		requireSignature: cfg.RequireSignature, signedMetadata: slices.Clone(cfg.SignedMetadata),
		topic: cfg.Topic, maxSize: cfg.MaxSize,
	}
	var err1, err2 error
	c.encryption, err1 = newRing(cfg.Encryption, newAEAD)
	c.signature, err2 = newRing(cfg.Signature, newSigner)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("payload: %w", err)
	}
	return c, nil
}

func (cfg *Config) checkKeys(bad func(field, value, problem string)) {
	cfg.Encryption.check("Encryption", fitsEncryption, bad)
	if cfg.RequireEncryption && len(cfg.Encryption.Secrets) == 0 {
		bad("RequireEncryption", "true", "needs keys in Encryption")
	}
	cfg.Signature.check("Signature", fitsSignature, bad)
	if cfg.RequireSignature && len(cfg.Signature.Secrets) == 0 {
		bad("RequireSignature", "true", "needs keys in Signature")
	}
	if e, s, found := common(cfg.Encryption, cfg.Signature); found {
		bad("Signature.Secrets["+strconv.Quote(text.Shorten(s))+"]", secret.Hidden, "must differ from the encryption key "+strconv.Quote(text.Shorten(e))+"; one key serves one purpose")
	}
}

func (cfg *Config) checkSignedMetadata(bad func(field, value, problem string)) {
	names := cfg.SignedMetadata
	if len(names) > 0 && len(cfg.Signature.Secrets) == 0 {
		bad("SignedMetadata", strconv.Itoa(len(names))+" names", "needs keys in Signature")
	}
	if len(names) > maxSigned {
		bad("SignedMetadata", strconv.Itoa(len(names))+" names", "must be at most "+strconv.Itoa(maxSigned))
	}
	for i, name := range names {
		field := "SignedMetadata[" + strconv.Itoa(i) + "]"
		switch {
		case !metadataNamePattern.MatchString(name):
			bad(field, strconv.Quote(text.Shorten(name)), "must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'")
		case strings.HasPrefix(name, prefix):
			bad(field, strconv.Quote(text.Shorten(name)), "must not begin with "+prefix+"; the codec's own metadata is always signed")
		case slices.Contains([]string{"traceparent", "tracestate", "baggage"}, strings.ToLower(name)):
			bad(field, strconv.Quote(name), "must not be signed: the outbox and its relays write the trace after the signature")
		case name == "oncemill-created-at": // outbox.CreatedAtMetadata
			bad(field, strconv.Quote(name), "must not be signed: relays write it after the signature")
		case slices.Contains(names[:i], name):
			bad(field, strconv.Quote(text.Shorten(name)), "is listed twice")
		}
	}
}

func (cfg *Config) fillStore(bad func(field, value, problem string)) {
	switch {
	case cfg.StoreFrom < 0:
		bad("StoreFrom", strconv.Itoa(cfg.StoreFrom), "must be at least 1 byte, or 0 for 256 KiB")
	case cfg.StoreFrom > 0 && cfg.Store == nil:
		bad("StoreFrom", strconv.Itoa(cfg.StoreFrom), "needs a Store")
	case cfg.StoreFrom == 0:
		cfg.StoreFrom = 256 << 10
	}
	switch {
	case cfg.StoreTimeout < 0:
		bad("StoreTimeout", cfg.StoreTimeout.String(), "must be positive, or 0 for 10s")
	case cfg.StoreTimeout > 0 && cfg.Store == nil:
		bad("StoreTimeout", cfg.StoreTimeout.String(), "needs a Store")
	case cfg.StoreTimeout == 0:
		cfg.StoreTimeout = 10 * time.Second
	}
}
