package outboxstore

import (
	"encoding/binary"
	"fmt"
	"time"
)

// Ref is the identity of a row. The id alone is not enough: a server that lost its
// latest commits gives ids out again.
type Ref struct {
	Lane      int
	ID        int64
	MessageID string
	CreatedAt time.Time // by the database's clock, at the insert
	CTID      CTID      // not part of the identity
}

// CTID is the physical location of a row when it was read, its ctid on PostgreSQL. It
// makes the removal of many rows cheaper. A wrong or missing one does no harm there. A
// row that was changed has a new one. SQLite has none.
type CTID struct {
	block uint32 // of the partition
	item  uint16 // in the block; 0 for none
}

// CTIDOf returns the ctid in the binary form of tidsend.
func CTIDOf(tid []byte) CTID {
	if len(tid) != ctidWidth {
		return CTID{}
	}
	return CTID{block: binary.BigEndian.Uint32(tid), item: binary.BigEndian.Uint16(tid[4:])}
}

const ctidWidth = 6

// String returns c as a tid of PostgreSQL.
func (c CTID) String() string { return fmt.Sprintf("(%d,%d)", c.block, c.item) }

// Row is a message in the outbox: one that the broker has not confirmed.
type Row struct {
	Ref
	Topic    string
	Key      string // empty for an unkeyed message
	Payload  []byte
	Metadata []byte // see DecodeMetadata

	// Hollow reports that payload and metadata were not read; see ReadRequest.Hollow.
	Hollow bool

	// Missing is the length of the payload if it was too long to be read; see
	// ReadPiece. 0: it was read.
	Missing int
}

// Known returns what identifies the row to a reader that holds it.
func (r Ref) Known() Known { return Known{ID: r.ID, CreatedAt: r.CreatedAt} }

// ReadRequest selects what to read. Every lane is read from its start, in the order of
// ids.
type ReadRequest struct {
	Lanes []int
	Rows  int // largest number of rows of each lane
	Bytes int // largest number of bytes of payload and metadata of each lane; at least one row is returned

	// Known are the rows that the caller already holds; the read passes over them. They
	// are rows whose deletion has not committed before this read. Of rows with one id,
	// PostgreSQL passes over the newest only.
	Known []Known

	// Busy are keys to pass over, because enough of their rows already wait at the
	// caller.
	Busy []string

	// Hollow are topics whose rows are returned without payload and metadata, with
	// Row.Hollow set: the caller cannot send them now, and only needs to know that they
	// exist. They count as rows, but as no bytes.
	Hollow []string

	// Peek is set if there is probably nothing to read. PostgreSQL then looks first
	// whether any lane has a row, by a statement without parameters: lib/pq uses one round
	// trip for it, and two for others.
	Peek bool
}

// Known identifies a row that a reader holds. The id alone is not enough: a server that
// lost its latest commits gives ids out again, and the row that has one now is another.
type Known struct {
	ID        int64
	CreatedAt time.Time
}

// Ahead selects the rows that ReadAhead returns from each lane.
type Ahead struct {
	Topics []string // the oldest rows of these
	Newest int      // and this many of the newest rows of other topics
	Not    []string // but none of these topics

	Look int // how many of the newest rows of each lane to consider

	// Scan bounds the search for earlier rows of the same keys, in rows of the table.
	// If the table has as many or more, no row with a key is returned.
	Scan int

	Unordered bool // keys do not order rows
}

// Removing is how Remove removes rows.
type Removing struct {
	Move       bool // into the history
	SkipLocked bool // rows that others have locked are returned
}

// Removal is the result of outboxqueue.Queue.Remove.
type Removal struct {
	// Missed is the number of rows that were removed but not kept in the history,
	// because it could not be written.
	Missed int

	// Locked are rows that still exist because another transaction has locked them.
	// Remove them again later.
	Locked []Ref
}
