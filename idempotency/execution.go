package idempotency

import "context"

// work is what runs under a claim: a request or a command.
type work interface {
	// start begins an attempt. tx is nil if effects are elsewhere.
	start(ctx context.Context, tx *sqlTx) *attempt

	// expire is called when time is up before an attempt has returned.
	expire(a *attempt)

	// said returns what an attempt reported about its effects, once it has returned.
	said(a *attempt) said

	// completion encodes the stored form of an attempt.
	completion(a *attempt) (Completion, error)

	// recovered makes an attempt of the result of Config.Failures.Recover.
	recovered(ctx context.Context, found Recovery) (*attempt, error)
}

// said is what an attempt reports about its effects.
type said int

const (
	failed    said = iota // nothing: it panicked, or answered with 5xx, or an error
	succeeded             // they are there, or shall be
	refused               // there is none, and the same request would be refused again
	declined              // there is none; the same request may succeed later
)

// outcome is the outcome of a run. It decides what happens to the claim; see settled.
type outcome int

const (
	stored      outcome = iota // the answer is stored, with the effects of the transaction
	released                   // there is no effect, as the handler says
	timedOut                   // there is no effect: rolled back, since time was up
	contended                  // there is no effect: it lost against other transactions
	uncommitted                // there is no effect: the database refused the commit
	unreachable                // there is no effect: the store could not be reached
	unknown                    // there may be effects elsewhere
	unstored                   // there may be effects elsewhere, and their answer could not be stored
	lostClaim                  // the claim is another's, and what was in the transaction is rolled back
	uncertain                  // the transaction has committed or not
)

// ending is the outcome of a run, with its last attempt, if there was one.
type ending struct {
	outcome    outcome
	attempt    *attempt
	completion Completion // of what is stored
	err        error      // why nothing is
}

// execution is a claim and what runs under it. It is the only place that runs handlers, of
// requests and commands, in transactions and without.
//
// The difference is where the effects of an attempt are. In the transaction they are
// rolled back with it, so a failure has had no effect. Elsewhere they stay: once the
// function has been called, the outcome is unknown unless the function reports it.
type execution struct {
	*intent
	work
}
