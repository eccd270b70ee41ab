package idempotency

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"

	"github.com/oncemill/oncemill"
)

// Unlimited as Config.MaxOutstanding lets a caller have any number of keys outstanding.
const Unlimited = -1

// Config configures an Engine. Only Scope is required. An engine is cheap: make one for
// each kind of route that needs a different Config, on one store.
type Config struct {
	// Scope returns the scope that the key belongs to. It runs for each request, after the
	// application's authentication. An error answers with 500 and is logged. Required; see
	// SingleTenant. Commands and Watermill handlers specify their scope themselves.
	Scope func(*http.Request) (Scope, error)

	// Secret makes the stored hashes of keys an HMAC, so that short keys cannot be guessed
	// from a copy of the table. All processes need the same Secret; changing it makes every
	// key new. Default: none (SHA-256).
	Secret Secret

	// Header is the name of the key's header. Default: "Idempotency-Key".
	Header string

	// Methods are the methods that need a key; all others pass untouched. Default: POST, PUT
	// and PATCH.
	Methods []string

	// Optional lets requests without a key through. They run as if there were no middleware;
	// in TxMiddleware still in a transaction.
	Optional bool

	// StrictUUID refuses keys that are not UUIDs. Upper and lower case are equal.
	StrictUUID bool

	// TrimSpace removes white space inside the quotes of a key.
	TrimSpace bool

	// Body selects how bodies are compared. Default: BodyRaw.
	Body BodyKind

	// FingerprintHeaders are further headers to compare. Default: only the content type is
	// compared.
	FingerprintHeaders []string

	// MaxBody is the largest request body in bytes; larger ones are answered with 413. Each
	// request in flight holds its body in memory. Default: 1 MiB. At most 1 GiB.
	MaxBody int64

	// Timeout is how long the claim and the handler may take together, from the end of the
	// request's body. Then the handler's context ends and the client gets 503. http.Server's
	// ReadTimeout limits how long a body may take. Default: 25 s.
	Timeout time.Duration

	// Lease is how long a claim keeps others away from a key whose process has died. At
	// least 1 s, and a fifth longer than Timeout. Default: 30 s, or Timeout and a fifth if
	// that is longer.
	Lease time.Duration

	// Isolation is the isolation level of TxMiddleware's transactions on PostgreSQL.
	// Default: READ COMMITTED. SQLite is always serializable.
	Isolation sql.IsolationLevel

	// Retries is how often TxMiddleware and Do run a handler again after a serialization
	// failure or a deadlock, within Timeout. Default: 10.
	Retries int

	// GroupSize is how many requests may share a transaction in TxMiddleware; see there for
	// what this requires of handlers. Claims that need not be durable, including those of
	// Do, then share a statement. Default: 1, which means that each has its own. At most
	// 1,000.
	GroupSize int

	// Crashed selects what Middleware does with a key whose run has an unknown outcome
	// because its process died or it failed (see Failed). With TxMiddleware the outcome is
	// known: there was no effect. Default: CrashedUnknown.
	Crashed CrashPolicy

	// Failed selects the state of a key after a failure without [NoEffect]: a handler in
	// Middleware that panics, answers with 5xx or takes longer than Timeout, or a command in
	// Do that returns an error. Default: FailedUnknown.
	Failed FailurePolicy

	// Recover finds out what happened, for CrashedRecover.
	Recover func(ctx context.Context, record Record) (Recovery, error)

	// MaxOutstanding is how many running keys, with a lease that has not ended, a caller
	// (tenant and principal) may have. More are answered with 429. They are not counted at
	// every claim: each process lets a caller exceed the limit by up to a quarter of what it
	// had left a second ago. Default: 1,000. See Unlimited.
	MaxOutstanding int

	// InProgress selects the answer to a copy of a running request. Default:
	// InProgressConflict.
	InProgress InProgressPolicy

	// WaitTimeout is how long InProgressWait waits. It also applies to copies that run after
	// one that failed. Default: 10 s.
	WaitTimeout time.Duration

	// RetryAfter is how long clients are asked to wait, in whole seconds. Default: 1 s.
	RetryAfter time.Duration

	// ReusedStatus is the status for a key that is used with a different request: 422 or
	// 409. Default: 422.
	ReusedStatus int

	// StatusPath is the path under which StatusHandler is served, ending in a slash. It is
	// required for InProgressAccepted, and mentioned in other answers. Default: none.
	StatusPath string

	// DocURL is the page that explains the problem types, which are its fragments. Default:
	// oncemill's own.
	DocURL string

	// Answer writes answers that do not come from the handler. It may change the problem,
	// for example its status. Default: WriteProblem.
	Answer func(w http.ResponseWriter, r *http.Request, p Problem)

	// Storable reports whether responses with a status are stored and replayed. A status
	// below 400 that is not stored makes the key not replayable. Any other releases the key,
	// but see Failed. An error with Retry-After, or with a problem that ends in
	// "in-progress", is never stored. Default: StorableDefault.
	Storable func(status int) bool

	// MaxResponse is the largest body in bytes that is stored. A larger response is sent
	// once; then the key is not replayable. Default: 1 MiB. At most 64 MiB.
	MaxResponse int

	// DropHeaders are headers that are not stored, in addition to Set-Cookie, Date and
	// connection headers.
	DropHeaders []string

	// AllowStreaming permits a handler in Middleware to flush. Then its response is sent as
	// it is written and is not replayed: copies get 409 response-not-stored. Its status has
	// the same meaning as that of any other response, so a streamed 5xx leaves an unknown
	// outcome. Default: false; flushing fails with [ErrStreaming].
	AllowStreaming bool

	// Pointer stores the status, Location and resource id, but no body. A replay has the
	// headers and an empty body, or the body that Resolve returns.
	Pointer bool

	// Resolve returns the body of a replay for Pointer. An error answers with 503.
	Resolve func(ctx context.Context, record Record) ([]byte, error)

	// CompressAbove compresses stored responses above this many bytes. Default: 0, which
	// means never.
	CompressAbove int

	// Encryption encrypts stored responses. Default: none.
	Encryption *Encryption

	// LargeAbove stores responses above this many bytes in a separate table. Default: 64
	// KiB.
	LargeAbove int

	// Retention is how long a response is replayed. 1 s to 366 days. Default: 24 h.
	Retention time.Duration

	// RetentionFor returns the retention of one response; 0 means Retention. r is nil for a
	// command.
	RetentionFor func(r *http.Request, status int) time.Duration

	// RefuseExpired answers a key with 410 for this long after its response has expired,
	// instead of running it again. Default: 0.
	RefuseExpired time.Duration

	// FailOpen lets Middleware run requests unprotected while the store cannot be
	// reached, instead of answering 503. TxMiddleware never does.
	FailOpen bool

	// Cache answers replays without the store. Default: none.
	Cache Cache

	// CorrelationHeader names a header of the request that is stored with the
	// claim, unless Encryption is set. Default: "X-Correlation-Id".
	CorrelationHeader string

	// OnCommit is called after a commit, for example (*outbox.Outbox).Wake. It
	// must not block.
	OnCommit func()

	// PurgeEvery is the pause between two purges of Run. Default: 1 min.
	PurgeEvery time.Duration

	// PurgeBatch is how many records one transaction of a purge deletes at most. On SQLite
	// it deletes fewer when others wait to write. Default: 1,000.
	PurgeBatch int

	// TenantAttribute adds the tenant to metrics, which costs a time series per tenant.
	TenantAttribute bool

	// Logger receives the events of keys at debug level, and events that need an operator's
	// attention at higher levels. Default: slog.Default().
	Logger *slog.Logger

	// MeterProvider makes the metrics. Default: otel.GetMeterProvider().
	MeterProvider metric.MeterProvider
}

// defaultDoc is the page that explains the problem types.
const defaultDoc = "https://github.com/oncemill/oncemill/blob/main/docs/idempotency.md"

func (c Config) resolve() (Config, error) {
	var errs []error
	bad := func(field, value, problem string) {
		errs = append(errs, &oncemill.ConfigError{Field: "idempotency.Config." + field, Value: value, Problem: problem})
	}
	duration := func(field string, value *time.Duration, fallback, least, most time.Duration) {
		if *value == 0 {
			*value = fallback
		}
		if *value < least || *value > most {
			bad(field, value.String(), fmt.Sprintf("must be %s to %s, or 0 for %s", least, most, fallback))
		}
	}
	number := func(field string, value *int, fallback, least, most int) {
		if *value == 0 {
			*value = fallback
		}
		if *value < least || *value > most {
			bad(field, strconv.Itoa(*value), fmt.Sprintf("must be %d to %d, or 0 for %d", least, most, fallback))
		}
	}
	if c.Scope == nil {
		bad("Scope", "nil", "is needed: it keeps callers' keys apart; idempotency.SingleTenant() where there is one caller")
	}
	const year = 366 * 24 * time.Hour
	duration("Timeout", &c.Timeout, 25*time.Second, time.Millisecond, time.Hour)
	duration("Lease", &c.Lease, max(30*time.Second, c.Timeout+c.Timeout/5), time.Second, 2*time.Hour)
	if c.Lease < c.Timeout+c.Timeout/5 {
		bad("Lease", c.Lease.String(), "must be a fifth longer than Timeout, or a claim would be taken over from a living handler")
	}
	duration("WaitTimeout", &c.WaitTimeout, 10*time.Second, time.Millisecond, time.Hour)
	duration("RetryAfter", &c.RetryAfter, time.Second, time.Second, time.Hour)
	duration("Retention", &c.Retention, 24*time.Hour, time.Second, year)
	duration("PurgeEvery", &c.PurgeEvery, time.Minute, time.Millisecond, 24*time.Hour)
	number("PurgeBatch", &c.PurgeBatch, 1000, 1, 100_000)
	number("Retries", &c.Retries, 10, 0, 1000)
	number("GroupSize", &c.GroupSize, 1, 1, 1000)
	number("MaxResponse", &c.MaxResponse, 1<<20, 1, mostResponse)
	number("LargeAbove", &c.LargeAbove, 64<<10, 1, 64<<20)
	if c.MaxOutstanding != Unlimited {
		number("MaxOutstanding", &c.MaxOutstanding, 1000, 1, 1_000_000)
	}
	if c.MaxBody == 0 {
		c.MaxBody = 1 << 20
	}
	if c.MaxBody < 1 || c.MaxBody > 1<<30 {
		bad("MaxBody", strconv.FormatInt(c.MaxBody, 10), "must be 1 to 1073741824 bytes, or 0 for 1 MiB")
	}
	if c.RefuseExpired < 0 || c.RefuseExpired > year {
		bad("RefuseExpired", c.RefuseExpired.String(), "must be 0 to "+year.String())
	}
	if c.CompressAbove < 0 {
		bad("CompressAbove", strconv.Itoa(c.CompressAbove), "must not be negative; 0 means never")
	}
	if c.Header == "" {
		c.Header = "Idempotency-Key"
	}
	c.Header = textproto.CanonicalMIMEHeaderKey(c.Header)
	if !isHeaderName(c.Header) {
		bad("Header", strconv.Quote(c.Header), "must be the name of a header")
	}
	if c.CorrelationHeader == "" {
		c.CorrelationHeader = "X-Correlation-Id"
	}
	if len(c.Methods) == 0 {
		c.Methods = []string{http.MethodPost, http.MethodPut, http.MethodPatch}
	}
	if slices.Contains(c.Methods, http.MethodGet) || slices.Contains(c.Methods, http.MethodHead) {
		bad("Methods", strings.Join(c.Methods, ","), "GET and HEAD change nothing and need no key")
	}
	c.DropHeaders = canonicalNames(c.DropHeaders)
	c.FingerprintHeaders = canonicalNames(c.FingerprintHeaders)
	slices.Sort(c.FingerprintHeaders)
	if c.Body != BodyRaw && c.Body != BodyJSON {
		bad("Body", strconv.Itoa(int(c.Body)), "must be BodyRaw or BodyJSON")
	}
	if c.Crashed < CrashedUnknown || c.Crashed > CrashedRecover {
		bad("Crashed", strconv.Itoa(int(c.Crashed)), "must be CrashedUnknown, CrashedTakeOver or CrashedRecover")
	}
	if c.Failed != FailedUnknown && c.Failed != FailedRelease {
		bad("Failed", strconv.Itoa(int(c.Failed)), "must be FailedUnknown or FailedRelease")
	}
	if (c.Crashed == CrashedRecover) != (c.Recover != nil) {
		bad("Recover", strconv.FormatBool(c.Recover != nil), "belongs to Crashed: CrashedRecover, which needs it")
	}
	if c.InProgress < InProgressConflict || c.InProgress > InProgressWait {
		bad("InProgress", strconv.Itoa(int(c.InProgress)), "must be InProgressConflict, InProgressTooEarly, InProgressTooManyRequests, InProgressAccepted or InProgressWait")
	}
	if c.StatusPath != "" && (c.StatusPath[0] != '/' || !strings.HasSuffix(c.StatusPath, "/")) {
		bad("StatusPath", strconv.Quote(c.StatusPath), "must begin and end with a slash")
	}
	if c.InProgress == InProgressAccepted && c.StatusPath == "" {
		bad("StatusPath", `""`, "is needed by InProgressAccepted")
	}
	switch c.ReusedStatus {
	case 0:
		c.ReusedStatus = http.StatusUnprocessableEntity
	case http.StatusUnprocessableEntity, http.StatusConflict:
	default:
		bad("ReusedStatus", strconv.Itoa(c.ReusedStatus), "must be 422 or 409")
	}
	switch c.Isolation {
	case sql.LevelDefault:
		c.Isolation = sql.LevelReadCommitted
	case sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable:
	default:
		bad("Isolation", c.Isolation.String(), "must be sql.LevelReadCommitted, sql.LevelRepeatableRead or sql.LevelSerializable")
	}
	if c.Storable == nil {
		c.Storable = StorableDefault
	}
	if c.Answer == nil {
		c.Answer = WriteProblem
	}
	if c.DocURL == "" {
		c.DocURL = defaultDoc
	}
	if c.OnCommit == nil {
		c.OnCommit = func() {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	return c, errors.Join(errs...)
}

// mostResponse is the upper bound of Config.MaxResponse.
const mostResponse = 64 << 20

// retention returns the retention of a response; r is nil for a command.
func (c *Config) retention(r *http.Request, status int) time.Duration {
	if c.RetentionFor != nil {
		if d := c.RetentionFor(r, status); d > 0 {
			return d
		}
	}
	return c.Retention
}

func isHeaderName(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' })
}

func canonicalNames(names []string) []string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = textproto.CanonicalMIMEHeaderKey(name)
	}
	return out
}
