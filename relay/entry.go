package relay

import (
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill/internal/outboxstore"
	"github.com/oncemill/oncemill/internal/relaystore"
)

// state is the state of an entry between its table and its deletion.
type state uint8

const (
	stateWaiting    state = iota // behind another message of its key
	stateReady                   // to be published
	stateWithheld                // by its topic's circuit
	stateUnclear                 // failed, perhaps by its own fault; its topic's others decide
	stateAnnouncing              // its id is being recorded, since it is published alone
	stateInFlight                // handed to the sink, no outcome yet
	stateAgain                   // unavailable, in a lane that is one pipeline
	stateFailed                  // its failure is to be recorded
	stateFollower                // to be moved behind the retrying message of its key
	stateConfirmed               // to be deleted
	stateForgotten               // no longer known to the lane; lists may still have it
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
	metadata  []byte // as it is stored; decoded when it is published
	malformed error  // the row cannot become a message; its outcome without a sink
	state     state
	deadline  time.Time // of the outcome, while in flight
	handed    time.Time // to the sink, latest
	next      *entry    // of the same key
	sent      uint64    // number of its latest publish
	failedAt  uint64    // number of the last publish before it became unclear; 0: it is not

	unclearSince time.Time           // when it became unclear
	retrying     bool                // its row is in the table parked
	ahead        bool                // it goes before what was read before it
	crashed      bool                // a worker died with it alone in flight: it is published alone
	released     bool                // let out by a circuit
	moving       bool                // part of the running task
	attempts     int                 // failed so far
	age          time.Duration       // from its first failure until this attempt was due
	failure      *relaystore.Failure // until it is recorded
	stack        string              // of the panic that its latest publish ended with

	hollow     bool // without its payload: it cannot be sent
	unanswered bool // a copy of it may have arrived although no confirm came
	told       bool // its row says so
	arrived    bool // a confirm of it has come
	late       bool // its confirm came while it was being moved, or after
	locked     bool // its deletion found it locked by another transaction

	span trace.Span // of the publish; nil: not traced
}

func (m *entry) size() int { return len(m.Payload) + len(m.metadata) }

// newEntry returns an entry for a row.
func newEntry(r outboxstore.Row) *entry {
	m := &entry{}
	m.fill(r)
	return m
}

func (m *entry) fill(r outboxstore.Row) {
	m.Message = Message{
		Lane: r.Lane, ID: r.ID, Topic: r.Topic, MessageID: r.MessageID, Key: r.Key,
		Payload: r.Payload, CreatedAt: r.CreatedAt, entry: m,
	}
	m.ctid, m.metadata, m.hollow = r.CTID, r.Metadata, r.Hollow
}
