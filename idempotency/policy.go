package idempotency

import "net/http"

// CrashPolicy is what Middleware does about a key whose owner died.
type CrashPolicy int

const (
	// CrashedUnknown answers 409 outcome-unknown until the key expires, or somebody who has
	// found out calls [Engine.Settle].
	CrashedUnknown CrashPolicy = iota
	// CrashedTakeOver runs the handler again: for handlers that are idempotent by
	// themselves.
	CrashedTakeOver
	// CrashedRecover asks Config.Recover.
	CrashedRecover
)

// FailurePolicy is what a failure leaves behind where effects are not in a transaction.
type FailurePolicy int

const (
	// FailedUnknown leaves a key whose outcome is unknown, for Config.Crashed to decide
	// about: the effect may have happened before the failure.
	FailedUnknown FailurePolicy = iota
	// FailedRelease lets the key run again. It is safe where a handler's effects are
	// idempotent by themselves, or come after everything that can fail; elsewhere
	// they may happen twice.
	FailedRelease
)

// Recovery is what Config.Recover found out. The zero value: still unknown.
type Recovery struct {
	RunAgain bool        // the effect did not happen: run the handler
	Status   int         // the effect happened: this is the answer, 200 to 599, if not 0
	Header   http.Header // at most 64 KiB
	Body     []byte      // for Do the result, as encoding/json encodes it
}

// InProgressPolicy is how a copy of a running request is answered.
type InProgressPolicy int

const (
	// InProgressConflict answers 409 with Retry-After.
	InProgressConflict InProgressPolicy = iota
	// InProgressTooEarly answers 425 with Retry-After.
	InProgressTooEarly
	// InProgressTooManyRequests answers 429 with Retry-After.
	InProgressTooManyRequests
	// InProgressAccepted answers 202 with the URL of the status in Location.
	InProgressAccepted
	// InProgressWait waits up to Config.WaitTimeout for the answer, then 409.
	InProgressWait
)

// StorableDefault stores 2xx, 3xx, 400, 404, 409, 410, 412 and 422: what would be
// answered the same way again. It stores no 401, 403, 429 and 5xx, since the same
// request may succeed later.
func StorableDefault(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusConflict, http.StatusGone,
		http.StatusPreconditionFailed, http.StatusUnprocessableEntity:
		return true
	}
	return StorableSuccesses(status) || status >= 300 && status < 400
}

// StorableSuccesses stores 2xx only.
func StorableSuccesses(status int) bool { return status >= 200 && status < 300 }

// StorableAll stores whatever a handler answered, also 500, as Stripe does.
func StorableAll(int) bool { return true }
