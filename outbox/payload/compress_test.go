package payload_test

import (
	"bytes"
	"compress/gzip"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill/outbox/payload"
)

func compressed(t testing.TB, body []byte, change func(*gzip.Writer)) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if change != nil {
		change(w)
	}
	if _, err := w.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func marked(body []byte, encoding string) *message.Message {
	msg := message.NewMessage("1", body)
	msg.Metadata.Set(payload.EncodingMetadata, encoding)
	return msg
}

func TestDecode_StopsAtTheLargestSize(t *testing.T) {
	t.Parallel()
	const most = 64 << 10
	codec := newCodec(t, payload.Config{MaxSize: most})
	full := make([]byte, most)
	if got := decode(t, codec, marked(compressed(t, full, nil), "gzip")); !bytes.Equal(got.Payload, full) {
		t.Errorf("got %d bytes", len(got.Payload))
	}
	refused(t, codec, marked(compressed(t, make([]byte, most+1), nil), "gzip"), payload.ErrTooLarge)
	refused(t, codec, marked(compressed(t, make([]byte, 100*most), nil), "gzip"), payload.ErrTooLarge)
}

// Neither a false size nor a decompression bomb takes more memory than the limit.
func TestDecode_AllocatesNoMemoryForClaimedSizes(t *testing.T) {
	const most = 64 << 10
	codec := newCodec(t, payload.Config{MaxSize: most})
	lie := compressed(t, []byte("tea"), nil)
	copy(lie[len(lie)-4:], "\xff\xff\xff\xff")
	bomb := compressed(t, make([]byte, 100*most), nil)
	for name, c := range map[string]struct {
		body []byte
		want error
		most uint64
	}{
		"lie":  {lie, payload.ErrEncoding, 128 << 10},
		"bomb": {bomb, payload.ErrTooLarge, 2*most + 128<<10},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		refused(t, codec, marked(c.body, "gzip"), c.want)
		runtime.ReadMemStats(&after)
		if taken := after.TotalAlloc - before.TotalAlloc; taken > c.most {
			t.Errorf("%s: %d bytes were allocated, at most %d are right", name, taken, c.most)
		}
	}
}

func TestDecode_RefusesBadGzip(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, payload.Config{})
	good := compressed(t, []byte("tea and more tea"), nil)
	noise := make([]byte, 100)
	random := rand.NewChaCha8([32]byte{})
	random.Read(noise)
	for name, body := range map[string][]byte{
		"empty": nil, "plain": []byte("tea"), "noise": noise, "header alone": good[:10], "cut": good[:len(good)-1],
		"trailing": append(bytes.Clone(good), 0), "two": append(bytes.Clone(good), good...),
		"checksum": append(append(bytes.Clone(good[:len(good)-8]), 1, 2, 3, 4), good[len(good)-4:]...),
	} {
		t.Run(name, func(t *testing.T) { refused(t, codec, marked(body, "gzip"), payload.ErrEncoding) })
	}
	named := compressed(t, []byte("tea"), func(w *gzip.Writer) { w.Name, w.Comment, w.Extra = "name", "comment", []byte("extra") })
	if got := decode(t, codec, marked(named, "gzip")); string(got.Payload) != "tea" {
		t.Errorf("got %q", got.Payload)
	}
	// A bad stream does not affect the next one.
	if got := decode(t, codec, marked(good, "gzip")); string(got.Payload) != "tea and more tea" {
		t.Errorf("got %q", got.Payload)
	}
}

func TestDecode_RefusesUnknownEncodings(t *testing.T) {
	t.Parallel()
	cfg := everything(&objects{})
	cfg.RequireSignature, cfg.RequireEncryption = false, false
	codec := newCodec(t, cfg)
	const name = "00112233445566778899aabbccddeeff-00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	for _, encoding := range []string{
		"zstd", "GZIP", " gzip", "gzip ", "gzip,", ",gzip", ",", "gzip,gzip", "gzip,zstd", "aes-256-gcm", "aes-256-gcm:", "aes-256-gcm:a b",
		"aes-256-gcm:enc-1,gzip", "aes-256-gcm:enc-1,aes-256-gcm:enc-1", "claim:", "claim:x:1", "claim:" + name, "claim:" + name + ":",
		"claim:" + name + ":-1", "claim:" + name + ":01", "claim:" + name + ":+1", "claim:" + name + ":1:1", "claim:" + name + ":1,gzip",
		"claim:../../" + name[6:] + ":1", "claim:" + name[1:] + ":1", "claim:" + name + "0:1", "claim:" + name + ":99999999999999999999",
		"claim:A" + name[1:] + ":1", "claim:" + name + ":1,claim:" + name + ":1",
	} {
		t.Run(encoding, func(t *testing.T) { refused(t, codec, marked(nil, encoding), payload.ErrEncoding) })
	}
	withBody := marked([]byte("tea"), "claim:"+name+":1")
	refused(t, codec, withBody, payload.ErrEncoding)
}
