package idempotency

import (
	"context"
	"database/sql"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/oncemill/oncemill"
)

// Config configures an Engine. Only Scope is required. Most services also look at Timeout,
// Retention and OnCommit; the rest is in groups, whose zero values are right for most.
// An engine is cheap: make one for each kind of route that needs a different Config, on
// one store.
type Config struct {
	// Scope returns the scope that the key belongs to, for example the tenant and the user
	// that the application's authentication has found. It runs for each request. A
	// [*ScopeError], or a scope without Tenant and Principal, is answered with 400; another
	// error with 500, and logged. Required; see [SingleTenant]. Commands and Watermill
	// handlers specify their scope themselves.
	Scope func(*http.Request) (Scope, error)

	// Timeout is how long the claim and the handler may take together, from the end of the
	// request's body. Then the handler's context ends and the client gets 503. http.Server's
	// ReadTimeout limits how long a body may take. 1 ms to 1 h. Default: 25 s.
	Timeout time.Duration

	// Retention is how long a response is replayed. 1 s to 366 days. Default: 24 h. A longer
	// retention keeps more rows; see also Expiry.
	Retention time.Duration

	// OnCommit is called after a commit, for example (*outbox.Outbox).Wake. It must not
	// block. Default: nothing is called.
	OnCommit func()

	// Logger receives the events of keys at debug level, and events that need an operator's
	// attention at higher levels. Default: slog.Default().
	Logger *slog.Logger

	Keys         KeyConfig       // which requests need a key, and how it is read
	Requests     RequestConfig   // how requests with the same key are compared
	Transactions TxConfig        // how transactions run
	Failures     FailureConfig   // what happens to a key after a failure
	Answers      AnswerConfig    // answers that do not come from the handler
	Responses    ResponseConfig  // which responses are stored, and how
	Expiry       ExpiryConfig    // what happens after the retention
	Telemetry    TelemetryConfig // metrics and correlation
}

// Unlimited as KeyConfig.MaxOutstanding lets a caller have any number of keys outstanding.
const Unlimited = -1

// KeyConfig is which requests need a key, and how it is read.
type KeyConfig struct {
	// Secret makes the stored hashes of keys an HMAC, so that short keys cannot be guessed
	// from a copy of the table. All processes need the same Secret; changing it makes every
	// key new. Default: none (SHA-256).
	Secret oncemill.Secret

	// Header is the name of the key's header. Default: "Idempotency-Key".
	Header string

	// Methods are the methods that need a key, in upper case; all others pass untouched.
	// Default: POST, PUT and PATCH.
	Methods []string

	// Optional lets requests without a key through. They run as if there were no middleware;
	// in TxMiddleware still in a transaction. Default: false; they are answered with 400.
	Optional bool

	// StrictUUID refuses keys that are not UUIDs. Upper and lower case are equal. Default:
	// false.
	StrictUUID bool

	// TrimSpace removes white space inside the quotes of a key. Default: false.
	TrimSpace bool

	// MaxOutstanding is how many running keys, with a lease that has not ended, a caller
	// (tenant and principal) may have. More are answered with 429. They are not counted at
	// every claim: each process lets a caller exceed the limit by up to a quarter of what it
	// had left a second ago, and by what other processes claim at that moment and have not
	// committed. 1 to 1,000,000. Default: 1,000. See Unlimited.
	MaxOutstanding int

	// Quota limits how many keys a caller may use, and how much they store, in a window of
	// time. It needs a [QuotaStore], and on a [SQLStore] the table of [QuotaMigrations]. It
	// is not for the messages of Engine.Watermill, which have no caller. Default: no limit.
	Quota Quota

	// RateLimit is called before a key is claimed or its answer is looked for, for requests
	// with a key and for commands, but not for Engine.Watermill. A [*RateLimitError] refuses
	// the request with 429; after another error or a panic it is answered with 500, and the
	// error is logged. scope has the route. It runs in the time of Timeout, after which the
	// answer is 503, and must be safe for concurrent use. Default: none.
	RateLimit func(ctx context.Context, scope Scope) error
}

// RequestConfig is how requests with the same key are compared. Method, route, path,
// query, content type and body always are.
type RequestConfig struct {
	// Body selects how bodies are compared. Default: BodyRaw.
	Body BodyKind

	// Headers are further headers to compare. Default: none.
	Headers []string

	// MaxBody is the largest request body in bytes; larger ones are answered with 413. Each
	// request in flight holds its body in memory. Default: 1 MiB. At most 1 GiB.
	MaxBody int64
}

// TxConfig is how the transactions of TxMiddleware and Do run.
type TxConfig struct {
	// Isolation is the isolation level on PostgreSQL. SQLite is always serializable.
	// Default: READ COMMITTED.
	Isolation sql.IsolationLevel

	// Retries is how often a handler runs again after a serialization failure or a deadlock,
	// within Timeout. 1 to 1,000. Default: 10.
	Retries int

	// GroupSize is how many requests may share a transaction in TxMiddleware; see there for
	// what this requires of handlers. Claims that need not be durable, including those of
	// Do, then share a statement. Default: 1, which means that each has its own. At most
	// 1,000.
	GroupSize int
}

// FailureConfig is what happens to a key after a crash or a failure.
type FailureConfig struct {
	// Lease is how long a claim keeps others away from a key whose process has died. A
	// longer lease delays the retry after a crash. 1 s to 2 h, and at least a fifth longer
	// than Timeout. Default: 30 s, or Timeout and a fifth if that is longer.
	Lease time.Duration

	// Crashed selects what Middleware does with a key whose run has an unknown outcome
	// because its process died or it failed (see Failed). With TxMiddleware the outcome is
	// known: there was no effect. Default: CrashedUnknown.
	Crashed CrashPolicy

	// Failed selects the state of a key after a failure without [NoEffect]: a handler in
	// Middleware that panics, answers with a 5xx that Responses.Storable does not accept, or
	// takes longer than Timeout, or a command in Do that returns an error. Default:
	// FailedUnknown.
	Failed FailurePolicy

	// Recover finds out what happened. It is required for CrashedRecover, and has no use
	// without it. Its context ends with Timeout, which counts the handler's time, too. It may be
	// called for several copies at once, after the lease has ended: then one of those that it lets
	// run again does so.
	Recover func(ctx context.Context, record Record) (Recovery, error)

	// UniqueName names this process, where no two running processes that use these keys have
	// the same name, as in a StatefulSet. After a crash, the process that starts with that
	// name treats the leases of the crashed one as ended: the retry of an interrupted
	// request does not wait for Lease. If two processes have the name, each takes running
	// requests from the other; with TxMiddleware one of them is then rolled back. At most
	// 255 bytes. Default: "", every lease is waited for.
	UniqueName string

	// FailOpen lets Middleware run requests unprotected while the store cannot be
	// reached, instead of answering 503. TxMiddleware never does. Default: false.
	FailOpen bool
}

// AnswerConfig is how requests are answered that the handler does not answer.
type AnswerConfig struct {
	// InProgress selects the answer to a copy of a running request. Default:
	// InProgressConflict.
	InProgress InProgressPolicy

	// WaitTimeout is how long InProgressWait waits. It also applies to copies that run after
	// one that failed. 1 ms to 1 h. Default: 10 s.
	WaitTimeout time.Duration

	// RetryAfter is how long clients are asked to wait, in whole seconds. 1 s to 1 h.
	// Default: 1 s.
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

	// Write writes the answer. It may change the problem, for example its status. Default:
	// WriteProblem.
	Write func(w http.ResponseWriter, r *http.Request, p Problem)
}

// ResponseConfig is which responses are stored, and how.
type ResponseConfig struct {
	// Storable reports whether responses with a status are stored and replayed. A status
	// below 400 that is not stored makes the key not replayable. Any other releases the key,
	// but see FailureConfig.Failed. An error with Retry-After is never stored, nor is a 409 or 202
	// with a problem whose type is, after its last "/" or "#", in-progress or outcome-unknown. The first
	// releases the key, the second counts as a failure. A panic is logged and counts as false.
	// Default: StorableDefault.
	Storable func(status int) bool

	// MaxSize is the largest body in bytes that is stored. A larger response is sent once;
	// then the key is not replayable. Each response is in memory until it is sent. Default:
	// 1 MiB. At most 64 MiB.
	MaxSize int

	// DropHeaders are headers that are not stored, in addition to Set-Cookie, Date and
	// connection headers. Default: none.
	DropHeaders []string

	// KeepHeaders are the only headers and trailers that are stored, such as Content-Type and
	// Location. Those of DropHeaders, Set-Cookie, Date and connection headers are not stored
	// even then. Default: none, which means all others.
	KeepHeaders []string

	// Redact changes what is stored of the response to a request: headers and body, after
	// KeepHeaders and DropHeaders. The answer is a copy: the first client gets the response as
	// the handler wrote it, and retries the redacted one. Changes of Status are ignored, and
	// Set-Cookie, Date and connection headers stay away. After an error, a panic, or with a body
	// above MaxSize, nothing is stored, and the key is not replayable. What it does not get is
	// not stored: trailers, and the Location of a response that is not replayable. It may run
	// several times for one response, and must not read the request's body. The results of
	// commands and what operators store are not redacted. Default: none.
	Redact func(r *http.Request, answer *Answer) error

	// AllowStreaming permits a handler in Middleware to flush. Then its response is sent as
	// it is written and is not replayed: copies get 409 response-not-stored. Its status has
	// the same meaning as that of any other response, so a streamed 5xx that Storable does not
	// accept leaves an unknown outcome. Default: false; flushing fails with [ErrStreaming].
	AllowStreaming bool

	// Pointer stores the status, the headers and the resource id, but no body. A replay has
	// the headers and an empty body, or the body that Resolve returns. Default: false.
	Pointer bool

	// Resolve returns the body of a replay for Pointer. An error answers with 503. Default:
	// the body is empty.
	Resolve func(ctx context.Context, record Record) ([]byte, error)

	// CompressAbove compresses stored responses above this many bytes. Default: 0, which
	// means never.
	CompressAbove int

	// LargeAbove stores responses above this many bytes in a separate table, so that the
	// table of keys stays small; not with Expiry.RefuseFor. 1 to 64 MiB. Default: 64 KiB.
	LargeAbove int

	// Encryption encrypts stored responses. Default: none.
	Encryption *Encryption

	// Cache answers replays without the store. Default: none.
	Cache Cache
}

// ExpiryConfig is what happens to a key after Config.Retention.
type ExpiryConfig struct {
	// RetentionFor returns the retention of one response; 0 means Config.Retention. r is nil
	// for a command. Default: Config.Retention for all.
	RetentionFor func(r *http.Request, status int) time.Duration

	// RefuseFor answers a key with 410 for this long after its response has expired, instead
	// of running it again. A key whose outcome is unknown has no response: it is forgotten
	// Config.Retention after its claim, whatever RefuseFor says, and then runs again. 0 to 366
	// days. Default: 0.
	RefuseFor time.Duration

	// Archive is called with records that are past their retention, PurgeBatch at a time,
	// before Run and Purge delete them: nothing is deleted for which it has not returned nil.
	// After a crash, or if several processes run, it gets records again, so it must be
	// idempotent. Its context ends after a minute, and then it gets them again. It gets no responses. What operators release or erase
	// is not archived.
	//
	// A key past its retention is then answered with 410 until its record has been archived,
	// instead of running again at once, and each claim is preceded by a look at the key's
	// record. Needs a [SQLStore]. Default: none.
	Archive Archive

	// ArchivedElsewhere means that [SQLStore.PurgeArchived], or oncemill purge --archive-dir,
	// archives the records: Run and Purge delete none, and keys past their retention are
	// answered as with Archive. Default: false.
	ArchivedElsewhere bool

	// PurgeEvery is the pause between two purges of Run. 1 ms to 24 h. Default: 1 min.
	PurgeEvery time.Duration

	// PurgeBatch is how many records one transaction of a purge deletes at most. On SQLite
	// it deletes fewer when others wait to write. 1 to 100,000. Default: 1,000.
	PurgeBatch int
}

// TelemetryConfig is what an engine reports.
type TelemetryConfig struct {
	// CorrelationHeader names a header of the request that is stored with the claim, unless
	// responses are encrypted. Default: "X-Correlation-Id".
	CorrelationHeader string

	// TenantAttribute adds the tenant to metrics, which costs a time series per tenant.
	// Default: false.
	TenantAttribute bool

	// MeterProvider makes the metrics. Default: otel.GetMeterProvider().
	MeterProvider metric.MeterProvider

	// TracerProvider receives a span of each request and command with a key, with the hash of
	// the key, the endpoint and how it ended. A span in the context is its parent. The
	// handler's context has the span. Default: otel.GetTracerProvider().
	TracerProvider trace.TracerProvider
}

// retention returns the retention of a response; r is nil for a command.
func (c *Config) retention(r *http.Request, status int) time.Duration {
	if c.Expiry.RetentionFor != nil {
		if d := c.Expiry.RetentionFor(r, status); d > 0 {
			return d
		}
	}
	return c.Retention
}
