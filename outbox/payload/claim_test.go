package payload_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/outbox"
	"github.com/oncemill/oncemill/outbox/payload"
)

func TestClaim_StoresLargePayloadsAndLeavesAReference(t *testing.T) {
	t.Parallel()
	store := &objects{}
	codec := newCodec(t, payload.Config{Store: store, StoreFrom: 100})
	small := message.NewMessage("1", make([]byte, 99))
	expectEqual(t, encode(t, codec, small), small)
	large := message.NewMessage("2", bytes.Repeat([]byte("x"), 100))
	encoded := encode(t, codec, large)
	if len(encoded.Payload) != 0 || encoded.Payload == nil {
		t.Errorf("the payload is %v", encoded.Payload)
	}
	names := store.names()
	if len(names) != 1 || !regexp.MustCompile(`^[0-9a-f]{32}-[0-9a-f]{64}$`).MatchString(names[0]) || !bytes.Equal(store.all[names[0]], large.Payload) {
		t.Errorf("stored %v", names)
	}
	expectEqual(t, decode(t, codec, encoded), large)

	whatever := newCodec(t, payload.Config{Store: store})
	expectEqual(t, encode(t, whatever, message.NewMessage("3", make([]byte, 256<<10-1))), message.NewMessage("3", make([]byte, 256<<10-1)))
	if got := encode(t, whatever, message.NewMessage("3", make([]byte, 256<<10))); len(got.Payload) != 0 {
		t.Error("256 KiB were not stored by default")
	}
}

// A repeated attempt, for example after a commit without answer, must not damage the objects
// of an earlier one, which may have committed.
func TestClaim_RepeatedAttemptsOverwriteNothingElse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg     payload.Config
		objects int
	}{
		"plain": {payload.Config{}, 1}, "compressed": {payload.Config{CompressFrom: 1}, 1}, "encrypted": {payload.Config{Encryption: keys("e")}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			store := &objects{}
			c.cfg.Store, c.cfg.StoreFrom = store, 1
			codec := newCodec(t, c.cfg)
			var attempts []*message.Message
			for range 3 {
				attempts = append(attempts, encode(t, codec, order("1")))
			}
			if n := len(store.names()); n != c.objects || store.puts != 3 {
				t.Errorf("%d objects after %d puts, want %d", n, store.puts, c.objects)
			}
			for _, attempt := range attempts {
				expectEqual(t, decode(t, codec, attempt), order("1"))
			}
			// Other messages with the same payload have other objects.
			encode(t, codec, order("2"))
			if n := len(store.names()); n != c.objects+1 {
				t.Errorf("%d objects", n)
			}
		})
	}
}

// Even without encryption and signature.
func TestClaim_IsRefusedForAnotherMessage(t *testing.T) {
	t.Parallel()
	codec := newCodec(t, payload.Config{Store: &objects{}, StoreFrom: 1})
	encoded := encode(t, codec, order("1"))
	refused(t, codec, renamed(encoded, "2"), payload.ErrClaim)
	for _, header := range []string{payload.TopicMetadata, outbox.KeyMetadata} {
		changed := encoded.Copy()
		changed.Metadata[header] = "other"
		if _, err := codec.Decode(t.Context(), "", changed); !errors.Is(err, payload.ErrClaim) {
			t.Errorf("%s changed: %v", header, err)
		}
	}
	expectEqual(t, decode(t, codec, encoded), order("1"))
}

func TestClaim_FailuresOfTheStoreAreTemporary(t *testing.T) {
	t.Parallel()
	store := &objects{}
	codec := newCodec(t, payload.Config{Store: store, StoreFrom: 1})
	encoded := encode(t, codec, order("1"))
	outage := errors.New("outage")
	store.fail = outage
	refused(t, codec, encoded, payload.ErrStore)
	if _, err := codec.Decode(t.Context(), "", encoded); !errors.Is(err, outage) || !strings.Contains(err.Error(), claimed(t, encoded)) {
		t.Errorf("got %v", err)
	}
	if _, err := codec.Encode(t.Context(), "orders", "", order("2")); !errors.Is(err, payload.ErrStore) || !errors.Is(err, outage) {
		t.Errorf("got %v", err)
	}
	store.fail = nil
	expectEqual(t, decode(t, codec, encoded), order("1"))

	missing := newCodec(t, payload.Config{Store: &objects{}})
	refused(t, missing, encoded, payload.ErrStore)
	if _, err := missing.Decode(t.Context(), "", encoded); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	refused(t, newCodec(t, payload.Config{}), encoded, payload.ErrStore)
	cut := newCodec(t, payload.Config{Store: cutStore{store}})
	refused(t, cut, encoded, payload.ErrStore)
}

// cutStore loses the connection in the middle of an object.
type cutStore struct{ *objects }

func (s cutStore) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	r, err := s.objects.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(io.MultiReader(io.LimitReader(r, 3), failingReader{})), nil
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// panickingStore panics, or returns a reader that does.
type panickingStore struct{ reads bool }

func (panickingStore) Put(context.Context, string, []byte) error { panic("no bucket") }

func (s panickingStore) Get(context.Context, string) (io.ReadCloser, error) {
	if s.reads {
		return io.NopCloser(nil), nil
	}
	panic("no bucket")
}

// A consumer decodes where nobody else recovers: it would end, and be given the same message
// at its next start.
func TestClaim_PanicsOfTheStoreAreErrors(t *testing.T) {
	t.Parallel()
	encoded := encode(t, newCodec(t, payload.Config{Store: &objects{}, StoreFrom: 1}), order("1"))
	var panicked *oncemill.PanicError
	for _, reads := range []bool{false, true} {
		codec := newCodec(t, payload.Config{Store: panickingStore{reads}, StoreFrom: 1})
		refused(t, codec, encoded, payload.ErrStore)
		if _, err := codec.Decode(t.Context(), "", encoded); !errors.As(err, &panicked) {
			t.Errorf("reads %v: got %v", reads, err)
		}
		if _, err := codec.Encode(t.Context(), "orders", "", order("2")); !errors.Is(err, payload.ErrStore) || !errors.As(err, &panicked) {
			t.Errorf("got %v", err)
		}
	}
}

// hangingStore answers when the context ends.
type hangingStore struct{}

func (hangingStore) Put(ctx context.Context, _ string, _ []byte) error {
	<-ctx.Done()
	return ctx.Err()
}

func (hangingStore) Get(ctx context.Context, _ string) (io.ReadCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestClaim_WaitsNoLongerThanTheTimeout(t *testing.T) {
	t.Parallel()
	for _, timeout := range []time.Duration{0, time.Minute} {
		want := max(timeout, 10*time.Second)
		if timeout == 0 {
			want = 10 * time.Second
		}
		synctest.Test(t, func(t *testing.T) {
			encoded := encode(t, newCodec(t, payload.Config{Store: &objects{}, StoreFrom: 1}), order("1"))
			codec := newCodec(t, payload.Config{Store: hangingStore{}, StoreFrom: 1, StoreTimeout: timeout})
			start := time.Now()
			refused(t, codec, encoded, payload.ErrStore)
			if waited := time.Since(start); waited != want {
				t.Errorf("Get was given %v, want %v", waited, want)
			}
			start = time.Now()
			_, err := codec.Encode(t.Context(), "orders", "", order("2"))
			if waited := time.Since(start); waited != want || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, payload.ErrStore) {
				t.Errorf("Put was given %v, error %v", waited, err)
			}
		})
	}
}

func TestClaim_ReadsNoMoreThanWasStored(t *testing.T) {
	t.Parallel()
	store := &objects{}
	large := message.NewMessage("1", make([]byte, 5000))
	encoded := encode(t, newCodec(t, payload.Config{Store: store, StoreFrom: 1}), large)
	sealed := encode(t, newCodec(t, payload.Config{Store: store, StoreFrom: 1, Encryption: keys("e")}), large)
	small := newCodec(t, payload.Config{Store: store, MaxSize: 4999, Encryption: keys("e")})
	refused(t, small, encoded, payload.ErrTooLarge)
	refused(t, small, sealed, payload.ErrTooLarge)
	if store.gets != 0 {
		t.Error("the store was asked for what is too large")
	}
	fitting := newCodec(t, payload.Config{Store: store, MaxSize: 5000, Encryption: keys("e")})
	expectEqual(t, decode(t, fitting, encoded), large)
	expectEqual(t, decode(t, fitting, sealed), large)

	endless := &endlessStore{}
	refused(t, newCodec(t, payload.Config{Store: endless}), encoded, payload.ErrClaim)
	if endless.read > 5000+bytes.MinRead || !endless.closed {
		t.Errorf("%d bytes were read of 5000, closed: %t", endless.read, endless.closed)
	}
}

// endlessStore returns an endless object for every name.
type endlessStore struct {
	payload.Store
	read   int
	closed bool
}

func (s *endlessStore) Get(context.Context, string) (io.ReadCloser, error) { return s, nil }

func (s *endlessStore) Read(p []byte) (int, error) {
	clear(p)
	s.read += len(p)
	return len(p), nil
}

func (s *endlessStore) Close() error {
	s.closed = true
	return nil
}
