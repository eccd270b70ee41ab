package outboxstore

import (
	"bytes"
	"database/sql"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"time"
)

// packedLane is a lane as returned by the statement read. The driver owns the memory.
type packedLane struct {
	lane                                                  int
	numbers, topics, messageIDs, keys, payloads, metadata sql.RawBytes
}

// The numbers of a row: its identity (id, time, ctid) and two lengths.
const (
	identityWidth = 8 + 8 + 6
	numbersWidth  = identityWidth + 4 + 4
)

// lengths returns -1 and 0 for a hollow row.
func lengths(numbers []byte) (payload, metadata int) {
	length := func(at int) int { return int(int32(binary.BigEndian.Uint32(numbers[at:]))) } //nolint:gosec // as int4send wrote it
	return length(identityWidth), length(identityWidth + 4)
}

func (p *packedLane) large(share int) bool {
	for numbers := range slices.Chunk(p.numbers, numbersWidth) {
		if payload, metadata := lengths(numbers); payload+metadata > share {
			return true
		}
	}
	return false
}

var errAnswer = errors.New("the answer does not have the expected form")

// unpack appends the rows of the lane. Texts share memory.
func (p *packedLane) unpack(rows []Row, mem *slab) ([]Row, error) {
	topics, messageIDs, keys := string(p.topics), string(p.messageIDs), string(p.keys)
	for numbers := range slices.Chunk([]byte(p.numbers), numbersWidth) {
		payload, metadata := lengths(numbers)
		if payload > len(p.payloads) || metadata > len(p.metadata) {
			return nil, errAnswer
		}
		r := Row{Ref: Ref{Lane: p.lane}, Hollow: payload < 0}
		r.identify(numbers)
		if !r.Hollow {
			r.Payload, r.Metadata = mem.clone(p.payloads[:payload]), mem.clone(p.metadata[:metadata])
			p.payloads, p.metadata = p.payloads[payload:], p.metadata[metadata:]
		}
		r.Topic, topics, _ = strings.Cut(topics, "\x00")
		r.MessageID, messageIDs, _ = strings.Cut(messageIDs, "\x00")
		r.Key, keys, _ = strings.Cut(keys, "\x00")
		rows = append(rows, r)
	}
	if len(p.payloads)+len(p.metadata)+len(topics)+len(messageIDs)+len(keys) > 0 {
		return nil, errAnswer
	}
	return rows, nil
}

// postgresEpoch is PostgreSQL's epoch, in microseconds since 1970.
var postgresEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()

// identify decodes the numbers of an identity: id, time, ctid.
func (r *Ref) identify(numbers []byte) {
	r.ID = int64(binary.BigEndian.Uint64(numbers))
	r.CreatedAt = time.UnixMicro(int64(binary.BigEndian.Uint64(numbers[8:])) + postgresEpoch).UTC()
	r.CTID = CTIDOf(numbers[16 : 16+ctidWidth])
}

// slab allocates memory for small pieces. A piece that lives on keeps at most slabSize
// bytes from being freed.
type slab struct{ free []byte }

const slabSize = 32 << 10

// clone never returns nil, which would be NULL.
func (s *slab) clone(b []byte) []byte {
	if len(b) > slabSize/8 {
		return bytes.Clone(b)
	}
	if s.free == nil || len(b) > cap(s.free)-len(s.free) {
		s.free = make([]byte, 0, slabSize)
	}
	s.free = append(s.free, b...)
	return s.free[len(s.free)-len(b) : len(s.free) : len(s.free)]
}
