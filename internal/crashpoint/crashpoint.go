// Package crashpoint names the moments at which the crucible makes a process die. Its
// functions do nothing, and cost nothing, unless the build tag crashpoints is set.
package crashpoint

// Moments that Reach names. Each is on the way of a message or request: between two of them
// something has become durable, or was handed to another system.
const (
	AfterClaim   = "after claim"   // the id of a message, or an idempotency key, is taken
	AfterEffect  = "after effect"  // the handler has returned
	BeforeCommit = "before commit" // of the transaction of a producer, a handler or a request
	AfterCommit  = "after commit"
	BeforeAnswer = "before answer" // to a request
	AfterAnswer  = "after answer"

	AfterTransmit = "after transmit" // a relay has handed messages to its sink
	AfterOutcome  = "after outcome"  // the sink has told it what became of one
)

// Calls are a relay's calls of its database, as the relay names them.
var Calls = []string{
	"reading the outbox", "deleting confirmed messages", "moving messages that failed", "renewing leases",
	"taking leases", "moving scheduled messages", "upkeep of the tables",
}

// Before is the moment before a relay calls its database.
func Before(call string) string { return "before " + call }

// After is the moment after it, whatever the answer.
func After(call string) string { return "after " + call }
