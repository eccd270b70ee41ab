package payload_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox/payload"
)

// shows reports whether text contains the key or the payload, in any of Go's formats for
// bytes.
func shows(text string, secrets ...[]byte) bool {
	for _, secret := range secrets {
		part := secret[4:20] // of its middle, whatever stands around it
		for _, form := range []string{
			string(part), fmt.Sprintf("%q", part)[1:10], strings.Trim(fmt.Sprintf("%d", part), "[]"), strings.Trim(fmt.Sprintf("%#v", part), "[]byte{}"),
			hex.EncodeToString(part), strings.ToUpper(hex.EncodeToString(part)), base64.StdEncoding.EncodeToString(part)[4:16],
			base64.StdEncoding.EncodeToString(secret)[8:24],
		} {
			if strings.Contains(text, form) {
				return true
			}
		}
	}
	return false
}

func TestSecret_DoesNotShow(t *testing.T) {
	t.Parallel()
	enc, sig := secretBytes("enc-1"), secretBytes("sig-1")
	cfg := everything(&objects{})
	codec := newCodec(t, cfg)
	hidden := struct {
		cfg    payload.Config
		codec  *payload.Codec
		secret oncemill.Secret
	}{cfg, codec, cfg.Encryption.Secrets["enc-1"]}
	for _, v := range []any{cfg, &cfg, cfg.Encryption, cfg.Signature.Secrets["sig-1"], codec, hidden, &hidden, []any{codec}, map[string]any{"a": cfg}} {
		var printed bytes.Buffer
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
			fmt.Fprintf(&printed, verb, v)
		}
		slog.New(slog.NewTextHandler(&printed, nil)).Info("x", "v", v)
		slog.New(slog.NewJSONHandler(&printed, nil)).Info("x", "v", v)
		if encoded, err := json.Marshal(v); err == nil {
			printed.Write(encoded)
		}
		if shows(printed.String(), enc, sig) {
			t.Errorf("%T shows a key: %s", v, printed.String())
		}
	}
	if got := fmt.Sprintf("%v %s %x", cfg.Encryption.Secrets["enc-1"], cfg.Encryption.Secrets["enc-1"], codec); got != "[secret] [secret] payload.Codec" {
		t.Errorf("printed %s", got)
	}
}

// No error of the package contains anything of a payload or a key.
func TestErrors_ShowNoSecret(t *testing.T) {
	t.Parallel()
	canary := []byte("canary-canary-canary-canary-canary")
	enc, sig := secretBytes("enc-1"), secretBytes("sig-1")
	var errs []error
	for _, cfg := range guards(&objects{}) {
		for _, body := range [][]byte{canary, append(canary, bytes.Repeat([]byte("a"), 100)...)} {
			msg := order("1")
			msg.Payload = body
			msg.Metadata.Set("name", string(canary))
			codec := newCodec(t, cfg)
			encoded := encode(t, codec, msg)
			for header := range encoded.Metadata {
				changed := encoded.Copy()
				changed.Metadata[header] = "x" + changed.Metadata[header]
				_, err := codec.Decode(t.Context(), "orders", changed)
				errs = append(errs, err)
				delete(changed.Metadata, header)
				changed.Payload = body
				_, err = codec.Decode(t.Context(), "orders", changed)
				errs = append(errs, err)
			}
			_, err := codec.Encode(t.Context(), "orders", "", encoded)
			_, err2 := newCodec(t, payload.Config{MaxSize: 3}).Encode(t.Context(), "orders", "", msg)
			errs = append(errs, err, err2)
		}
	}
	short, twice := keys("a"), keys("b")
	short.Secrets["a"] = oncemill.NewSecret(enc[:31])
	twice.Secrets["b"] = oncemill.NewSecret(enc)
	_, err := payload.New(payload.Config{Encryption: short, Signature: payload.Keys{Secrets: map[string]oncemill.Secret{"c": oncemill.NewSecret(sig[:20])}}})
	_, err2 := payload.New(payload.Config{Encryption: twice, Signature: twice})
	errs = slices.DeleteFunc(append(errs, err, err2), func(err error) bool { return err == nil })
	if len(errs) < 50 {
		t.Errorf("%d errors", len(errs))
	}
	for _, err := range errs {
		for _, form := range []string{"%v", "%+v", "%#v"} {
			if text := fmt.Sprintf(form, err); shows(text, canary, enc, sig) {
				t.Errorf("shows a secret: %s", text)
			}
		}
	}
}

func TestNewSecret_CopiesItsBytes(t *testing.T) {
	t.Parallel()
	bytes := secretBytes("enc-1")
	cfg := payload.Config{Encryption: payload.Keys{Current: "enc-1", Secrets: map[string]oncemill.Secret{"enc-1": oncemill.NewSecret(bytes)}}}
	clear(bytes)
	encoded := encode(t, newCodec(t, cfg), order("1"))
	expectEqual(t, decode(t, newCodec(t, payload.Config{Encryption: keys("enc-1")}), encoded), order("1"))
}

func TestNew_NamesEveryBadValue(t *testing.T) {
	t.Parallel()
	bad := func(id string, n int) payload.Keys {
		return payload.Keys{Secrets: map[string]oncemill.Secret{id: oncemill.NewSecret(bytes.Repeat([]byte{7}, n))}}
	}
	const enc, sig, signed = "payload.Config.Encryption", "payload.Config.Signature", "payload.Config.SignedMetadata"
	for name, c := range map[string]struct {
		cfg    payload.Config
		fields []string
	}{
		"compress":            {payload.Config{CompressFrom: -1}, []string{"payload.Config.CompressFrom"}},
		"size":                {payload.Config{MaxSize: -1}, []string{"payload.Config.MaxSize"}},
		"size too large":      {payload.Config{MaxSize: 1<<30 + 1}, []string{"payload.Config.MaxSize"}},
		"store":               {payload.Config{StoreFrom: 1, StoreTimeout: 1}, []string{"payload.Config.StoreFrom", "payload.Config.StoreTimeout"}},
		"store negative":      {payload.Config{Store: &objects{}, StoreFrom: -1, StoreTimeout: -1}, []string{"payload.Config.StoreFrom", "payload.Config.StoreTimeout"}},
		"no keys":             {payload.Config{RequireEncryption: true, RequireSignature: true}, []string{"payload.Config.RequireEncryption", "payload.Config.RequireSignature"}},
		"current":             {payload.Config{Encryption: payload.Keys{Current: "x"}, Signature: payload.Keys{Current: "x", Secrets: keys("y").Secrets}}, []string{enc + ".Current", sig + ".Current"}},
		"encryption key":      {payload.Config{Encryption: bad("a", 16)}, []string{enc + `.Secrets["a"]`}},
		"encryption key long": {payload.Config{Encryption: bad("a", 33)}, []string{enc + `.Secrets["a"]`}},
		"signature key":       {payload.Config{Signature: bad("a", 31)}, []string{sig + `.Secrets["a"]`}},
		"no secret":           {payload.Config{Encryption: payload.Keys{Secrets: map[string]oncemill.Secret{"a": {}}}}, []string{enc + `.Secrets["a"]`}},
		"zero":                {payload.Config{Encryption: payload.Keys{Secrets: map[string]oncemill.Secret{"a": oncemill.NewSecret(make([]byte, 32))}}}, []string{enc + `.Secrets["a"]`}},
		"key id":              {payload.Config{Encryption: bad("a;b", 32), Signature: bad("", 33)}, []string{enc + `.Secrets["a;b"]`, sig + `.Secrets[""]`}},
		"key id long":         {payload.Config{Encryption: bad(strings.Repeat("a", 65), 32)}, []string{enc + `.Secrets["` + strings.Repeat("a", 64) + `…"]`}},
		"one key for both":    {payload.Config{Encryption: keys("a"), Signature: keys("a")}, []string{sig + `.Secrets["a"]`}},
		"signed, no key":      {payload.Config{SignedMetadata: []string{"name"}}, []string{signed}},
		"signed":              {payload.Config{Signature: keys("a"), SignedMetadata: []string{"", "a,b", "a;", "oncemill_key", "ok", "ok", "traceparent", "oncemill-created-at"}}, []string{signed + "[0]", signed + "[1]", signed + "[2]", signed + "[3]", signed + "[5]", signed + "[6]", signed + "[7]"}},
		"signed, many":        {payload.Config{Signature: keys("a"), SignedMetadata: strings.Split("abcdefghijklmnopq", "")}, []string{signed}},
	} {
		codec, err := payload.New(c.cfg)
		if codec != nil || !slices.Equal(configFields(err), c.fields) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	most := payload.Config{
		MaxSize: 1 << 30, Signature: keys("a"), SignedMetadata: strings.Split("abcdefghijklmnop", ""),
		Encryption: payload.Keys{Current: "A.b_c-9", Secrets: map[string]oncemill.Secret{"A.b_c-9": secret("z")}},
	}
	newCodec(t, most)
}

func configFields(err error) (fields []string) {
	var bad *oncemill.ConfigError
	switch joined := err.(type) { //nolint:errorlint // walks the tree itself
	case nil:
	case interface{ Unwrap() []error }:
		for _, e := range joined.Unwrap() {
			fields = append(fields, configFields(e)...)
		}
	default:
		if errors.As(err, &bad) {
			fields = append(fields, bad.Field)
		}
	}
	return fields
}
