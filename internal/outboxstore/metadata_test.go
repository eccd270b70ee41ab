package outboxstore_test

import (
	"encoding/json"
	"maps"
	"testing"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// The fast way to decode metadata gives what encoding/json gives, for any text.
func FuzzDecodeMetadata(f *testing.F) {
	for _, text := range []string{
		``, `{}`, `{"a":"b"}`, `{"a":"b","c":""}`, `{"a":"b","a":"c"}`, `{"":""}`, `{"a":"\u00e9"}`, `{"a":"é","b":"漢"}`,
		`{"a":"b"} `, `{ "a":"b"}`, `{"a":"b",}`, `{"a":1}`, `null`, `{"a":null}`, "{\"a\":\"\x00\"}", "{\"a\":\"\xff\"}",
		`{"a":"b"}{"c":"d"}`, `{"a\":\"b":"c"}`, `{"a":"b","c"}`, "{\"a\":\"\u2028\"}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := outboxstore.DecodeMetadata(text)
		if len(text) == 0 {
			if err != nil || len(got) != 0 {
				t.Errorf("nothing: %q, %v", got, err)
			}
			return
		}
		want := map[string]string{}
		wantErr := json.Unmarshal(text, &want)
		if (err != nil) != (wantErr != nil) {
			t.Fatalf("%q: %v, want %v", text, err, wantErr)
		}
		if err == nil && !maps.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	})
}
