package rabbitmq_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/inbox/rabbitmq"
)

const uuidHeader = amqp.DefaultMessageUUIDHeaderKey

func TestMarshaler_ReadsEveryHeaderAsText(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 21, 4, 5, 6, 0, time.FixedZone("", 3600))
	for want, value := range map[string]any{
		"plain":                         "plain",
		"not UTF-8: \xff":               "not UTF-8: \xff",
		"bytes":                         []byte("bytes"),
		"/wA=":                          []byte{0xff, 0},
		"null":                          nil,
		"true":                          true,
		"-7":                            int8(-7),
		"255":                           byte(255),
		"-300":                          int16(-300),
		"65535":                         uint16(65535),
		"-70000":                        int32(-70000),
		"4294967295":                    uint32(math.MaxUint32),
		"9223372036854775807":           int64(math.MaxInt64),
		"42":                            42,
		"0.1":                           float32(0.1),
		"1e+100":                        1e100,
		"NaN":                           math.NaN(),
		"-Inf":                          math.Inf(-1),
		"123.45":                        amqp091.Decimal{Scale: 2, Value: 12345},
		"-0.005":                        amqp091.Decimal{Scale: 3, Value: -5},
		"-2147483648":                   amqp091.Decimal{Value: math.MinInt32},
		"2026-11-21T03:05:06Z":          at,
		"[]":                            []any{},
		"{}":                            amqp091.Table{},
		`[1,"a<b",null,"/w==",[2.50]]`:  []any{int64(1), "a<b", nil, []byte{0xff}, []any{amqp091.Decimal{Scale: 2, Value: 250}}},
		`{"a":"NaN","b":{"c":"bytes"}}`: amqp091.Table{"b": map[string]any{"c": []byte("bytes")}, "a": math.NaN()},
		`[{"count":3,"queue":"stock","reason":"rejected","time":"2026-11-21T03:05:06Z"}]`: []any{
			amqp091.Table{"count": int64(3), "reason": "rejected", "queue": "stock", "time": at},
		},
		"{1}": struct{ int }{1},
	} {
		msg, err := rabbitmq.Marshaler{}.Unmarshal(amqp091.Delivery{Headers: amqp091.Table{"h": value}, Body: []byte("body")})
		if err != nil {
			t.Errorf("%#v: %v", value, err)
			continue
		}
		if got := msg.Metadata.Get("h"); got != want || len(msg.Metadata) != 1 || string(msg.Payload) != "body" {
			t.Errorf("%#v: got %q, want %q", value, got, want)
		}
	}
}

func TestMarshaler_ReadsTheIDFromHeaderOrProperty(t *testing.T) {
	t.Parallel()
	own := rabbitmq.Marshaler{Stock: amqp.DefaultMarshaler{MessageUUIDHeaderKey: "id"}}
	for _, c := range []struct {
		marshaler  rabbitmq.Marshaler
		headers    amqp091.Table
		property   string
		want       string
		asMetadata int
	}{
		{headers: amqp091.Table{uuidHeader: "header"}, property: "property", want: "header"},
		{headers: amqp091.Table{"other": "x"}, property: "property", want: "property", asMetadata: 1},
		{headers: amqp091.Table{uuidHeader: ""}, property: "property", want: "property"},
		{headers: amqp091.Table{uuidHeader: nil}, property: "property", want: "property"},
		{headers: amqp091.Table{uuidHeader: []byte("bytes")}, want: "bytes"},
		{headers: amqp091.Table{uuidHeader: int64(17)}, want: "17"},
		{marshaler: own, headers: amqp091.Table{"id": "own", uuidHeader: "stock"}, want: "own", asMetadata: 1},
		{want: ""},
	} {
		msg, err := c.marshaler.Unmarshal(amqp091.Delivery{Headers: c.headers, MessageId: c.property})
		if err != nil || msg.UUID != c.want || len(msg.Metadata) != c.asMetadata || msg.Metadata == nil {
			t.Errorf("%v, %q: got %q, %v, %v", c.headers, c.property, msg.UUID, msg.Metadata, err)
		}
	}
}

func TestMarshaler_WritesWhatTheStockMarshalerReads(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("an-id", []byte{0, 1, 0xff})
	msg.Metadata.Set("customer", "Zoë")
	publishing, err := rabbitmq.Marshaler{}.Marshal(msg)
	if err != nil {
		t.Fatal(err)
	}
	if publishing.MessageId != "an-id" || publishing.DeliveryMode != amqp091.Persistent {
		t.Errorf("got %+v", publishing)
	}
	for _, reader := range []amqp.Marshaler{amqp.DefaultMarshaler{}, rabbitmq.Marshaler{}} {
		read, err := reader.Unmarshal(amqp091.Delivery{Headers: publishing.Headers, MessageId: publishing.MessageId, Body: publishing.Body})
		if err != nil || !read.Equals(msg) {
			t.Errorf("%T: got %+v, %v", reader, read, err)
		}
	}
}

func TestMarshaler_LeavesAnIDThatIsSetAndOneThatDoesNotFit(t *testing.T) {
	t.Parallel()
	setting := rabbitmq.Marshaler{Stock: amqp.DefaultMarshaler{PostprocessPublishing: func(p amqp091.Publishing) amqp091.Publishing {
		p.MessageId = "set"
		return p
	}}}
	publishing, err := setting.Marshal(message.NewMessage("an-id", nil))
	if err != nil || publishing.MessageId != "set" {
		t.Errorf("got %q, %v", publishing.MessageId, err)
	}
	long := strings.Repeat("x", 256)
	publishing, err = rabbitmq.Marshaler{}.Marshal(message.NewMessage(long, nil))
	if err != nil || publishing.MessageId != "" || publishing.Headers[uuidHeader] != long {
		t.Errorf("got %q, %v", publishing.MessageId, err)
	}
}

// Whatever a delivery holds, it is read, and every header is there.
func FuzzMarshaler_Unmarshal(f *testing.F) {
	for i := range byte(20) {
		f.Add([]byte{i, 3, 'a', 'b', 'c', i + 1, i, 2, 1, 9, 200, 255, 0, i})
	}
	f.Add(bytes.Repeat([]byte{14, 1}, 200))
	f.Fuzz(func(t *testing.T, data []byte) {
		source := &values{data: data}
		headers := source.table(0)
		delivery := amqp091.Delivery{Headers: headers, MessageId: source.text(), Body: data}
		before := fmt.Sprint(maps.Clone(headers))
		msg, err := rabbitmq.Marshaler{}.Unmarshal(delivery)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(msg.Payload, data) {
			t.Error("the payload has changed")
		}
		for name, value := range headers {
			got, ok := msg.Metadata[name]
			if !ok && name != uuidHeader {
				t.Errorf("header %q is lost", name)
			}
			switch v := value.(type) {
			case string:
				if ok && got != v {
					t.Errorf("string %q became %q", v, got)
				}
			case []any, amqp091.Table:
				if ok && (!json.Valid([]byte(got)) || !utf8.ValidString(got)) {
					t.Errorf("%#v became %q", v, got)
				}
			}
		}
		if after := fmt.Sprint(headers); after != before {
			t.Errorf("the delivery was changed from %s to %s", before, after)
		}
	})
}

// values makes AMQP values of random bytes.
type values struct{ data []byte }

func (v *values) next() byte {
	if len(v.data) == 0 {
		return 0
	}
	b := v.data[0]
	v.data = v.data[1:]
	return b
}

func (v *values) text() string {
	n := min(int(v.next())%16, len(v.data))
	s := string(v.data[:n])
	v.data = v.data[n:]
	return s
}

func (v *values) table(depth int) amqp091.Table {
	table := amqp091.Table{}
	for range v.next() % 5 {
		name := v.text()
		if v.next()%8 == 0 {
			name = uuidHeader
		}
		table[name] = v.value(depth)
	}
	return table
}

func (v *values) value(depth int) any {
	number := func() (n int64) {
		for range 8 {
			n = n<<8 | int64(v.next())
		}
		return n
	}
	switch kind := v.next() % 20; kind {
	case 0:
		return nil
	case 1:
		return v.next()%2 == 0
	case 2:
		return v.next()
	case 3:
		return int8(v.next()) //nolint:gosec // any value will do
	case 4:
		return int16(number()) //nolint:gosec // any value will do
	case 5:
		return uint16(number()) //nolint:gosec // any value will do
	case 6:
		return int32(number()) //nolint:gosec // any value will do
	case 7:
		return uint32(number()) //nolint:gosec // any value will do
	case 8:
		return number()
	case 9:
		return math.Float32frombits(uint32(number())) //nolint:gosec // any value will do
	case 10:
		return math.Float64frombits(uint64(number())) //nolint:gosec // any value will do
	case 11:
		return []byte(v.text())
	case 12:
		return time.Unix(number(), 0)
	case 13:
		return amqp091.Decimal{Scale: v.next(), Value: int32(number())} //nolint:gosec // any value will do
	case 14, 15:
		list := []any{}
		for range v.next() % 4 {
			if depth < 100 {
				list = append(list, v.value(depth+1))
			}
		}
		return list
	case 16:
		if depth < 100 {
			return v.table(depth + 1)
		}
		return 1
	case 17:
		return v // no value of AMQP
	}
	return v.text()
}
