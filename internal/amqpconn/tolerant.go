package amqpconn

import (
	"bufio"
	"encoding/binary"
	"net"
)

// UnreadableHeader replaces the headers of a delivery that amqp091-go cannot read: nested
// deeper than 32 levels, or with more than 8,192 entries. amqp091-go would close the
// connection, and the broker would deliver the message again after every reconnection.
// Anybody can send such a message. The value of the header is the problem. (A sender who
// sets this header makes its own message unreadable.)
const UnreadableHeader = "oncemill_unreadable"

// tolerant is a connection that gives amqp091-go only headers that it can read. It inspects
// content headers, and passes on everything else.
type tolerant struct {
	net.Conn
	src   *bufio.Reader
	ready []byte // passed on first
	pass  int    // bytes of the current frame to pass on unchanged
	blind bool   // not AMQP: pass on everything
}

func newTolerant(conn net.Conn) *tolerant {
	return &tolerant{Conn: conn, src: bufio.NewReaderSize(conn, 32<<10)}
}

const (
	frameHead     = 7 // type, channel, size
	contentHeader = 2
	heartbeat     = 8

	// mostContent is above the size of a content header in any negotiated frame.
	mostContent = 1 << 20
)

// Read blocks only for the first byte.
func (t *tolerant) Read(p []byte) (n int, err error) {
	for n < len(p) {
		switch {
		case len(t.ready) > 0:
			k := copy(p[n:], t.ready)
			t.ready, n = t.ready[k:], n+k
			continue
		case n > 0 && t.src.Buffered() == 0:
			return n, nil
		case t.blind:
			k, err := t.src.Read(p[n:])
			return n + k, err
		case t.pass > 0:
			k, err := t.src.Read(p[n:min(len(p), n+t.pass)])
			t.pass, n = t.pass-k, n+k
			if err != nil {
				return n, err
			}
			continue
		}
		if n > 0 && t.src.Buffered() < frameHead {
			return n, nil
		}
		if err := t.next(); err != nil {
			return n, err
		}
	}
	return n, nil
}

// next inspects the next frame.
func (t *tolerant) next() error {
	head, err := t.src.Peek(frameHead)
	if err != nil {
		return err
	}
	size := int(binary.BigEndian.Uint32(head[3:]))
	switch {
	case head[0] == 0 || head[0] > heartbeat: // for example another version of the protocol
		t.blind = true
	case head[0] != contentHeader || size > mostContent:
		t.pass = frameHead + size + 1
	default:
		frame := make([]byte, frameHead+size+1)
		for at := 0; at < len(frame); {
			k, err := t.src.Read(frame[at:])
			if at += k; err != nil && at < len(frame) {
				return err
			}
		}
		t.ready = readable(frame)
	}
	return nil
}

// readable returns the frame of a content header, or a replacement without its headers.
func readable(frame []byte) []byte {
	const fixed, headers = 14, 1 << 13 // class, weight, body size, flags; the flag of the headers
	content := frame[frameHead : len(frame)-1]
	if len(content) < fixed {
		return frame
	}
	flags := binary.BigEndian.Uint16(content[fixed-2:])
	at := content[fixed:]
	for _, flag := range []uint16{1 << 15, 1 << 14} { // content type and encoding
		if flags&flag != 0 {
			if at = skipShort(at); at == nil {
				return frame
			}
		}
	}
	if flags&headers == 0 || len(at) < 4 {
		return frame
	}
	table := at
	_, problem := skipTable(table, 0)
	if problem == "" {
		return frame
	}
	var rest []byte // the properties after the headers
	if size := int64(binary.BigEndian.Uint32(table)); size <= int64(len(table)-4) {
		rest = table[4+size:]
	} else { // the properties after them cannot be found
		flags = flags&(1<<15|1<<14) | headers
	}
	entry := append([]byte{byte(len(UnreadableHeader))}, UnreadableHeader...)
	entry = append(entry, 'S')
	entry = binary.BigEndian.AppendUint32(entry, uint32(len(problem)))
	entry = append(entry, problem...)

	out := append([]byte(nil), frame[:frameHead+len(content)-len(table)]...)
	binary.BigEndian.PutUint16(out[frameHead+fixed-2:], flags)
	out = binary.BigEndian.AppendUint32(out, uint32(len(entry)))
	out = append(append(out, entry...), rest...)
	binary.BigEndian.PutUint32(out[3:], uint32(len(out)-frameHead))
	return append(out, frame[len(frame)-1])
}

// Limits of amqp091-go.
const (
	mostNested  = 32
	mostEntries = 8192
)

const (
	tooDeep   = "its headers are nested deeper than 32 levels"
	tooMany   = "its headers have more than 8192 entries"
	noHeaders = "its headers are not AMQP's"
)

// skipTable returns the bytes after a table, or the problem of the table.
func skipTable(b []byte, depth int) (rest []byte, problem string) {
	return skipEntries(b, depth, func(b []byte) []byte { return skipShort(b) })
}

func skipArray(b []byte, depth int) (rest []byte, problem string) {
	return skipEntries(b, depth, func(b []byte) []byte { return b })
}

// skipEntries returns the bytes after the entries, which begin with their length in bytes,
// each with a name.
func skipEntries(b []byte, depth int, skipName func([]byte) []byte) (rest []byte, problem string) {
	if depth > mostNested {
		return nil, tooDeep
	}
	if len(b) < 4 {
		return nil, noHeaders
	}
	size := int64(binary.BigEndian.Uint32(b))
	if size > int64(len(b)-4) {
		return nil, noHeaders
	}
	entries, rest := b[4:4+size], b[4+size:]
	for n := 0; len(entries) > 0; n++ {
		if n == mostEntries {
			return nil, tooMany
		}
		if entries = skipName(entries); entries == nil {
			return nil, noHeaders
		}
		if entries, problem = skipField(entries, depth); problem != "" {
			return nil, problem
		}
	}
	return rest, ""
}

// fieldSizes are the sizes of the types with a fixed size.
var fieldSizes = map[byte]int{
	't': 1, 'b': 1, 'B': 1, 's': 2, 'u': 2, 'I': 4, 'i': 4, 'l': 8, 'f': 4, 'd': 8, 'D': 5, 'T': 8, 'V': 0,
}

func skipField(b []byte, depth int) (rest []byte, problem string) {
	if len(b) == 0 {
		return nil, noHeaders
	}
	kind, b := b[0], b[1:]
	switch kind {
	case 'F':
		return skipTable(b, depth+1)
	case 'A':
		return skipArray(b, depth+1)
	case 'S', 'x':
		if len(b) < 4 {
			return nil, noHeaders
		}
		size := int64(binary.BigEndian.Uint32(b))
		if size > int64(len(b)-4) {
			return nil, noHeaders
		}
		return b[4+size:], ""
	}
	size, known := fieldSizes[kind]
	if !known || size > len(b) {
		return nil, noHeaders
	}
	return b[size:], ""
}

// skipShort returns the bytes after a short string, or nil if it is cut off.
func skipShort(b []byte) []byte {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return nil
	}
	return b[1+int(b[0]):]
}
