package amqpconn

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// content returns the frame of a content header with this table and a message id.
func content(table []byte) []byte {
	body := binary.BigEndian.AppendUint16(nil, 60)
	body = append(body, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7)
	body = binary.BigEndian.AppendUint16(body, 1<<15|1<<13|1<<7)
	body = append(body, 4, 'j', 's', 'o', 'n')
	body = append(binary.BigEndian.AppendUint32(body, uint32(len(table))), table...)
	body = append(body, 2, 'i', 'd')
	return frame(2, body)
}

func frame(kind byte, body []byte) []byte {
	f := binary.BigEndian.AppendUint32([]byte{kind, 0, 1}, uint32(len(body)))
	return append(append(f, body...), 0xCE)
}

// nested returns a table with a table in it, and so on; array makes them arrays.
func nested(depth int, array bool) []byte {
	inner := []byte{1, 'v', 't', 1}
	for range depth {
		kind := byte('F')
		if array {
			kind = 'A'
		}
		if array && inner[0] == 1 {
			inner = inner[2:] // elements have no name
		}
		wrapped := append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(inner))), inner...)
		inner = append([]byte{1, 'n'}, wrapped...)
	}
	return inner
}

type conn struct {
	net.Conn
	r io.Reader
}

func (c conn) Read(p []byte) (int, error)    { return c.r.Read(p) }
func (conn) SetReadDeadline(time.Time) error { return nil }

func TestTolerant_PassesOnWhatCanBeRead(t *testing.T) {
	t.Parallel()
	many := bytes.Repeat([]byte{1, 'a', 'V'}, 8192)
	all := append([]byte{3, 's', 't', 'r', 'S', 0, 0, 0, 1, 'x', 1, 'b', 'x', 0, 0, 0, 0}, []byte{1, 'd', 'D', 2, 0, 0, 0, 1, 1, 'T', 'T', 0, 0, 0, 0, 0, 0, 0, 1}...)
	var wire []byte
	for _, f := range [][]byte{
		frame(1, []byte("method")), content(nil), content(all), content(nested(32, false)), content(nested(32, true)), content(many),
		frame(3, bytes.Repeat([]byte("body"), 30_000)), frame(8, nil), frame(2, []byte("short")),
	} {
		wire = append(wire, f...)
	}
	for name, r := range map[string]io.Reader{"whole": bytes.NewReader(wire), "byte by byte": iotest.OneByteReader(bytes.NewReader(wire))} {
		got, err := io.ReadAll(newTolerant(conn{r: r}))
		if err != nil || !bytes.Equal(got, wire) {
			t.Errorf("%s: %d bytes of %d, %v", name, len(got), len(wire), err)
		}
	}
	other := []byte("AMQP\x00\x01\x00\x00 and whatever follows")
	if got, err := io.ReadAll(newTolerant(conn{r: bytes.NewReader(other)})); err != nil || !bytes.Equal(got, other) {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestTolerant_ReplacesWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		table   []byte
		problem string
	}{
		"deep tables":  {nested(33, false), tooDeep},
		"deep arrays":  {nested(33, true), tooDeep},
		"very deep":    {nested(10_000, false), tooDeep},
		"many entries": {bytes.Repeat([]byte{1, 'a', 'V'}, 8193), tooMany},
		"a type":       {[]byte{1, 'a', 'Z'}, noHeaders},
		"cut":          {[]byte{1, 'a', 'l', 0}, noHeaders},
		"a long lie":   {[]byte{1, 'a', 'S', 0xff, 0xff, 0xff, 0xff}, noHeaders},
	} {
		after := frame(3, []byte("payload"))
		wire := append(content(c.table), after...)
		got, err := io.ReadAll(newTolerant(conn{r: iotest.HalfReader(bytes.NewReader(wire))}))
		entry := append([]byte{byte(len(UnreadableHeader))}, UnreadableHeader+"S"...)
		entry = append(binary.BigEndian.AppendUint32(entry, uint32(len(c.problem))), c.problem...)
		if want := append(content(entry), after...); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %.200q, want %q, %v", name, got, want, err)
		}
	}
}

func FuzzTolerant(f *testing.F) {
	f.Add(content(nested(40, true)))
	f.Add(content([]byte(strings.Repeat("x", 100))))
	f.Fuzz(func(t *testing.T, wire []byte) {
		_, _ = io.ReadAll(newTolerant(conn{r: bytes.NewReader(wire)}))
		if len(wire) > 22 && len(wire) < 1000 {
			out := readable(frame(2, wire))
			if size := int(binary.BigEndian.Uint32(out[3:])); size != len(out)-8 {
				t.Errorf("the frame says %d and has %d", size, len(out)-8)
			}
			if again := readable(out); !bytes.Equal(again, out) {
				t.Errorf("what was replaced is replaced again")
			}
		}
	})
}
