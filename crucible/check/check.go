// Package check reads what a run of the crucible left, histories, tables and the record of the
// wire, and says which promises were broken. It shares no code with the library.
package check

import (
	"fmt"
	"time"

	"github.com/oncemill/oncemill/crucible/history"
)

// Input is everything that a run left.
type Input struct {
	Txs     []Tx   // transactions of producers, as they know them
	Sent    []Sent // rows of the table, written in the transactions of the messages
	Wire    []Copy // in the order of arrival
	Effects []Effect
	Letters []Letter

	LaneWrites []LaneWrite
	Listed     map[string]int // dead letters that package dlq lists, by state; nil: not asked

	Answers  []Answer       // to requests with idempotency keys
	Answered map[string]int // how often the request of a key took effect

	Consumers map[string]string // by topic: who handles its messages
	Left      map[string]int    // what is left in tables and queues, by name
	Balance   Balance

	Faults    []Fault
	Slow      []Fault                // when servers themselves were slow or away, or a process did not get to run
	Resent    map[int][]time.Time    // by lane: when a relay has logged that it sends something again
	Settled   map[string][]time.Time // by message id: when a consumer has logged that it was handled, or is a dead letter
	Lossy     []Window               // when a server without synchronous standbys may have lost what it acknowledged
	Lease     time.Duration
	End       time.Time // when producers stopped
	Processes map[string][]Usage
	Unclean   []string       // ends of processes that nothing explains
	Log       []string       // lines of the database's log that nothing explains
	States    map[string]int // rare states that were seen
	Wanted    []string       // rare states that a valid run sees
}

// Tx is a transaction of a producer.
type Tx struct {
	ID       string
	Outcome  string // "" if its process ended first
	Ended    time.Time
	Messages []history.Message
}

// Sent is a message of a committed transaction.
type Sent struct {
	Entry     int64
	Tx        string // or the attempt of the handler that produced it
	MessageID string
	Topic     string
	Key       string
	Seq       int64
	Scheduled bool
	Mood      string
	Sum       history.Sum
	At        time.Time
}

// Copy is a message on the wire.
type Copy struct {
	history.Copy

	At time.Time
}

// Effect is what a handler has left.
type Effect struct {
	Entry     int64
	Consumer  string
	MessageID string
	Key       string
	Seq       int64
	Attempt   string
	Sum       history.Sum
	At        time.Time
}

// Letter is a dead letter.
type Letter struct {
	ID             int64
	State          string // dead, held, replaying, discarding, replayed, discarded
	Source         string // relay or consumer
	Consumer       string
	MessageID      string
	Payload        string // sum
	MaybeDelivered bool
	ActedBy        string
}

// LaneWrite is a write that only the owner of a lane may make, as the database saw it.
type LaneWrite struct {
	Kind   string // LaneTaken, or what was written
	Lane   int
	Epoch  int64  // of the lane's lease in the transaction of the write
	Writer string // the life of a process
	At     time.Time
}

// LaneTaken is the kind of the write that makes the writer the owner of the epoch.
const LaneTaken = "take"

// open reports whether the message of the letter has no other end.
func (l Letter) open() bool { return l.State == "dead" || l.State == "held" }

// Answer is an answer to a request with an idempotency key.
type Answer = history.Answer

// Balance is the bank at the end.
type Balance struct {
	Accounts, Opened int64 // sum of the balances at the end and at the start
	Mirror           int64 // sum of what the ledger moved: 0
}

// Cluster is the target of a fault of one node of a cluster, which excuses nothing: the others
// take over. While they do, the servers count as slow.
const Cluster = "cluster"

// Window is a span of time.
type Window struct{ From, To time.Time }

// Fault is an injected fault.
type Fault struct {
	Window

	Kind, Target string
	Injected     time.Time // when it was there in full
}

// Usage is what a process used at a time.
type Usage struct {
	history.Resources

	At time.Time
}

// Result is the outcome of one checker.
type Result struct {
	Checker  string
	Promise  string
	Findings []string // each is a broken promise
	Note     string   // what was looked at
}

func (r *Result) found(format string, args ...any) {
	r.Findings = append(r.Findings, fmt.Sprintf(format, args...))
}

// Counts are the figures of the table.
type Counts struct {
	Transactions, RolledBack, Unknown int
	Messages, Copies, Effects         int
	Lost, Ghosts, DoubleEffects       int
	Reordered, DeadAndDelivered       int
	WireDuplicates, Unexplained       int
	Damaged, Stalls, Answers          int
	DeadLetters, Replayed, Discarded  int
	LostByServer                      LostByServer
	LongestStall                      time.Duration // that no fault excuses
	Judged                            float64       // share of the time that no fault excused
}

// Run runs all checkers.
func Run(in *Input) (Counts, []Result) {
	c := newIndex(in)
	results := []Result{
		c.loss(), c.ghosts(), c.once(), c.order(), c.exclusive(), c.consistent(), c.answers(), c.intact(),
		c.fenced(), c.liveness(), c.resources(), c.reached(), c.truthful(),
	}
	return c.counts, results
}
