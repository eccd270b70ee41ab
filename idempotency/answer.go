package idempotency

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"
)

// Problem is an answer that does not come from the handler, as defined by RFC 9457. It
// never contains key or scope.
type Problem struct {
	Kind   string // one of the Problem constants
	Type   string // URI: Config.Answers.DocURL with the kind as its fragment
	Title  string
	Status int
	Detail string

	Header http.Header // further headers: Link, Retry-After, Location
	State  string      // URL of the status, if there is one
}

// The kinds of problems.
const (
	ProblemScopeMissing     = "scope-missing"
	ProblemKeyMissing       = "key-missing"
	ProblemKeyInvalid       = "key-invalid"
	ProblemKeyReused        = "key-reused"
	ProblemInProgress       = "in-progress"
	ProblemOutcomeUnknown   = "outcome-unknown"
	ProblemNotStored        = "response-not-stored"
	ProblemKeyExpired       = "key-expired"
	ProblemBodyTooLarge     = "body-too-large"
	ProblemUnsupportedBody  = "unsupported-body"
	ProblemBodyBroken       = "body-broken"
	ProblemBodyTimeout      = "body-timeout"
	ProblemExecutionTimeout = "execution-timeout"
	ProblemCommitUnknown    = "commit-unknown"
	ProblemCommitFailed     = "commit-failed"
	ProblemContended        = "contended"
	ProblemStoreUnavailable = "store-unavailable"
	ProblemTooManyKeys      = "too-many-outstanding"
	ProblemSettledFailed    = "settled-failed"
	ProblemOverQuota        = "over-quota"
	ProblemRateLimited      = "rate-limited"
	ProblemInternal         = "internal"
)

const problemContentType = "application/problem+json"

type problemText struct {
	status int
	title  string
	detail string
	retry  bool // the same request may be sent again, later
	link   bool // the client's program has to be changed
}

var problemTexts = map[string]problemText{
	ProblemScopeMissing:     {400, "The caller is not known", "Keys belong to a caller: send the credentials, or the header, that identifies you.", false, false},
	ProblemKeyMissing:       {400, "Idempotency-Key is missing", "Send it with a key that is unique to this operation, for example a random UUID, and the same on every retry.", false, true},
	ProblemKeyInvalid:       {400, "Idempotency-Key is invalid", "Send one of 1 to 255 printable ASCII characters, for example a random UUID.", false, true},
	ProblemKeyReused:        {422, "Idempotency-Key was used for another request", "A key belongs to one request. Send a new operation with a new key, and a retry exactly as the first time.", false, true},
	ProblemInProgress:       {409, "The request is in progress", "A request with this key is being processed. Send it again later to get its answer.", true, false},
	ProblemOutcomeUnknown:   {409, "The outcome is unknown", "A request with this key was interrupted or failed. Whether it had an effect has to be found out in another way.", false, true},
	ProblemNotStored:        {409, "The response was not stored", "The request with this key was processed once. Its response was not kept.", false, true},
	ProblemKeyExpired:       {410, "The key has expired", "The request with this key was processed long ago, and its response is no longer kept.", false, true},
	ProblemBodyTooLarge:     {413, "The body is too large", "The body of this request is larger than the server takes for this operation.", false, false},
	ProblemUnsupportedBody:  {415, "The body cannot be compared", "The body is not what its content type says, so a retry could not be recognized.", false, true},
	ProblemBodyBroken:       {400, "The body is broken", "The body of this request ended early or is malformed. Send it again with the same key.", false, false},
	ProblemBodyTimeout:      {408, "The body took too long", "Send the request again with the same key.", true, false},
	ProblemExecutionTimeout: {503, "The request took too long", "Send it again later with the same key.", true, false},
	ProblemCommitUnknown:    {503, "The outcome is not known yet", "Send the request again later with the same key; it will have one effect.", true, false},
	ProblemCommitFailed:     {500, "The request could not be committed", "It had no effect.", false, false},
	ProblemContended:        {503, "The request lost against others", "It had no effect. Send it again later with the same key.", true, false},
	ProblemStoreUnavailable: {503, "The request could not be registered", "Send it again later with the same key.", true, false},
	ProblemTooManyKeys:      {429, "Too many requests are outstanding", "Wait for requests to be answered before sending more.", true, false},
	ProblemOverQuota:        {429, "The quota of keys is used up", "Requests with new keys are accepted again later. Retries of earlier ones get their answers.", true, false},
	ProblemRateLimited:      {429, "Too many requests", "Send the request again later with the same key.", true, false},
	ProblemSettledFailed:    {422, "The request failed", "It had no effect, and has none with this key. Send the operation again with a new key.", false, false},
	ProblemInternal:         {500, "Internal error", "", false, false},
}

func newProblem(kind, docURL string, retryAfter time.Duration) Problem {
	text := problemTexts[kind]
	p := Problem{Kind: kind, Type: docURL + "#" + kind, Title: text.title, Status: text.status, Detail: text.detail, Header: http.Header{}}
	if text.link {
		p.Header.Set("Link", "<"+docURL+">; rel=\"describedby\"")
	}
	if text.retry {
		p.Header.Set("Retry-After", seconds(retryAfter))
	}
	return p
}

func seconds(d time.Duration) string { return strconv.Itoa(int(math.Ceil(d.Seconds()))) }

// WriteProblem writes a problem as application/problem+json.
func WriteProblem(w http.ResponseWriter, _ *http.Request, p Problem) {
	body, err := json.Marshal(struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
		State  string `json:"status_url,omitempty"`
	}{p.Type, p.Title, p.Status, p.Detail, p.State})
	if err != nil {
		body = []byte("{}") // strings and a number always encode
	}
	for name, values := range p.Header {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Type", problemContentType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // a client that is gone needs no answer
}
