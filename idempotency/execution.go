package idempotency

import "context"

// work is what runs under a claim: a request or a command.
type work interface {
	// start begins an attempt. tx is nil if effects are elsewhere.
	start(ctx context.Context, tx *sqlTx) *attempt

	// expire is called when time is up before an attempt has returned.
	expire(a *attempt)

	// report returns what an attempt reported about its effects, once it has returned.
	report(a *attempt) report

	// completion encodes the stored form of an attempt.
	completion(a *attempt) (Completion, error)

	// recovered makes an attempt of the result of Config.Failures.Recover.
	recovered(ctx context.Context, found Recovery) (*attempt, error)
}

// report is what an attempt reports about its effects.
type report int

const (
	reportFailed    report = iota // unknown: it panicked, or answered with 5xx, or an error
	reportSucceeded               // they have happened, or shall be kept
	reportRefused                 // none, and the same request would be refused again
	reportDeclined                // none; the same request may succeed later
)

// outcome is the outcome of a run. It decides what happens to the claim; see settled.
type outcome int

const (
	outcomeStored      outcome = iota // the answer is stored, with the effects of the transaction
	outcomeReleased                   // there is no effect, as the handler reports
	outcomeTimedOut                   // there is no effect: rolled back, since time was up
	outcomeContended                  // there is no effect: it lost against other transactions
	outcomeUncommitted                // there is no effect: the database refused the commit
	outcomeUnreachable                // there is no effect: the store could not be reached
	outcomeUnknown                    // there may be effects elsewhere
	outcomeUnstored                   // there may be effects elsewhere, and their answer could not be stored
	outcomeLostClaim                  // another owner has the claim, and what was in the transaction is rolled back
	outcomeUncertain                  // the transaction has committed or not
)

// ending is the outcome of a run, with its last attempt, if there was one.
type ending struct {
	outcome    outcome
	attempt    *attempt
	completion Completion // of what is stored
	err        error      // why nothing is
}

// execution is a claim and what runs under it.
type execution struct {
	*intent
	work
}
