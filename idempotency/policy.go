package idempotency

import (
	"encoding/json"
	"net/http"
)

// CrashPolicy is what Middleware does with a key whose owner died.
type CrashPolicy int

const (
	// CrashedUnknown answers 409 outcome-unknown until the key expires, or until
	// [Engine.Settle] is called with the outcome.
	CrashedUnknown CrashPolicy = iota
	// CrashedTakeOver runs the handler again, for handlers that are themselves idempotent.
	CrashedTakeOver
	// CrashedRecover calls Config.Failures.Recover.
	CrashedRecover
)

// FailurePolicy is the state of a key after a failure whose effects are not in a
// transaction.
type FailurePolicy int

const (
	// FailedUnknown leaves a key whose outcome is unknown, which Config.Failures.Crashed then
	// handles. The effect may have happened before the failure.
	FailedUnknown FailurePolicy = iota
	// FailedRelease lets the key run again. It is safe if a handler's effects are idempotent
	// themselves, or happen after everything that can fail; otherwise they may happen twice.
	FailedRelease
)

// Recovery is what Config.Failures.Recover found out. The zero value means still unknown.
type Recovery struct {
	RunAgain bool        // the effect did not happen: run the handler
	Status   int         // the effect happened: this is the answer, 200 to 599, for Do below 400, if not 0
	Header   http.Header // at most 64 KiB
	Body     []byte      // for Do the result, as encoding/json encodes it
}

// Failed returns the answer for a request whose effect did not happen and is not to happen
// under this key: 422 with a problem that asks for a new key. It is for [Admin.Settle] and
// [Engine.Settle], and not for commands.
func Failed() Recovery {
	p := newProblem(ProblemSettledFailed, defaultDoc, 0)
	body, _ := json.Marshal(map[string]any{"type": p.Type, "title": p.Title, "status": p.Status, "detail": p.Detail}) // strings and a number always encode
	return Recovery{Status: p.Status, Header: http.Header{"Content-Type": {problemContentType}}, Body: body}
}

// InProgressPolicy is the answer to a copy of a running request.
type InProgressPolicy int

const (
	// InProgressConflict answers 409 with Retry-After.
	InProgressConflict InProgressPolicy = iota
	// InProgressTooEarly answers 425 with Retry-After.
	InProgressTooEarly
	// InProgressTooManyRequests answers 429 with Retry-After.
	InProgressTooManyRequests
	// InProgressAccepted answers 202 with the status URL in Location.
	InProgressAccepted
	// InProgressWait waits up to Config.Answers.WaitTimeout for the answer, then answers 409.
	InProgressWait
)

// StorableDefault stores 2xx, 3xx, 400, 404, 409, 410, 412 and 422, which the same request
// would get again. It stores no 401, 403, 429 and 5xx, since the same request may succeed
// later.
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

// StorableAll stores every answer of a handler, including 500, as Stripe does.
func StorableAll(int) bool { return true }

// BodyKind is how bodies are compared.
type BodyKind int

const (
	// BodyRaw compares bytes. It is the default.
	BodyRaw BodyKind = iota
	// BodyJSON compares bodies whose content type is JSON by [CanonicalJSON], so that white
	// space and the order of names do not matter.
	BodyJSON
)
