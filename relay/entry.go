package relay

import (
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/outboxstore"
)

// state is the state of an entry between its table and its deletion.
type state uint8

const (
	waiting    state = iota // behind another message of its key
	ready                   // to be published
	withheld                // by its topic's circuit
	suspected               // failed, perhaps by its own fault; its topic's others decide
	announcing              // its id is being recorded, since it goes out alone
	inFlight                // handed to the sink, no outcome yet
	again                   // unavailable, in a lane that is one pipeline
	charged                 // its failure is to be recorded
	follower                // to be moved behind its key in parked
	confirmed               // to be deleted
	forgotten               // no longer known to the lane; lists may still have it
)

// rowID is the identity of a row in its lane. The id alone is not enough: a server that
// lost its latest commits gives ids out again.
type rowID struct {
	id      int64
	created int64 // microseconds
}

func (m *entry) rowID() rowID { return rowID{m.ID, m.CreatedAt.UnixMicro()} }

// entry is a row that a lane knows.
type entry struct {
	Message
	lane      *lane
	ctid      outboxstore.CTID
	metadata  []byte // as it is stored; decoded when it goes out
	malformed error  // the row cannot become a message; its outcome without a sink
	state     state
	deadline  time.Time // of the outcome, while in flight
	next      *entry    // of the same key
	sent      uint64    // number of its latest publish
	failedAt  uint64    // number of the last publish before it became a suspect; 0: it is none

	doubted  time.Time // when it became a suspect
	parked   bool      // its row is in parked
	ahead    bool      // it goes before what was read before it
	crashed  bool      // a worker died with it alone in flight: it goes out alone
	released bool      // let out by a circuit
	moving   bool      // part of the running chore
	attempts int       // failed so far
	expires  time.Time // the time limit of its attempts; zero: none
	failure  *failure  // while charged

	hollow     bool // without its payload: it cannot be sent
	unanswered bool // a copy of it may have arrived although no confirm came
	arrived    bool // a confirm of it has come
	late       bool // its confirm came while it was being moved, or after
	locked     bool // its deletion found it locked by another transaction

	span trace.Span // of the publish; nil: not traced
}

func (m *entry) size() int { return len(m.Payload) + len(m.metadata) }
