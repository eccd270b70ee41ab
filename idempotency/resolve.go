package idempotency

import (
	"cmp"
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
)

// defaultDoc is the page that explains the problem types.
const defaultDoc = "https://github.com/oncemill/oncemill/blob/main/docs/idempotency.md"

const year = 366 * 24 * time.Hour

// resolve returns c with its defaults, and all bad values.
func (c Config) resolve() (Config, error) {
	v := &values{}
	if c.Scope == nil {
		v.bad("Scope", "nil", "is needed: it keeps callers' keys apart; idempotency.SingleTenant() where there is one caller")
	}
	v.duration("Timeout", &c.Timeout, 25*time.Second, time.Millisecond, time.Hour)
	v.duration("Retention", &c.Retention, 24*time.Hour, time.Second, year)
	if c.OnCommit == nil {
		c.OnCommit = func() {}
	}
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Keys.resolve(v)
	c.Requests.resolve(v)
	c.Transactions.resolve(v)
	c.Failures.resolve(v, c.Timeout)
	c.Answers.resolve(v)
	c.Responses.resolve(v)
	c.Expiry.resolve(v)
	c.Telemetry.CorrelationHeader = cmp.Or(c.Telemetry.CorrelationHeader, "X-Correlation-Id")
	if c.Telemetry.MeterProvider == nil {
		c.Telemetry.MeterProvider = otel.GetMeterProvider()
	}
	if c.Telemetry.TracerProvider == nil {
		c.Telemetry.TracerProvider = otel.GetTracerProvider()
	}
	return c, errors.Join(v.errs...)
}

func (c *KeyConfig) resolve(v *values) {
	c.Header = textproto.CanonicalMIMEHeaderKey(cmp.Or(c.Header, "Idempotency-Key"))
	v.name("Keys.Header", c.Header)
	if len(c.Methods) == 0 {
		c.Methods = []string{http.MethodPost, http.MethodPut, http.MethodPatch}
	}
	if slices.Contains(c.Methods, http.MethodGet) || slices.Contains(c.Methods, http.MethodHead) {
		v.bad("Keys.Methods", strings.Join(c.Methods, ","), "GET and HEAD change nothing and need no key")
	}
	if slices.ContainsFunc(c.Methods, func(m string) bool { return m == "" || m != strings.ToUpper(m) }) {
		v.bad("Keys.Methods", strings.Join(c.Methods, ","), "must be in upper case, as requests have them; others would pass without a key")
	}
	if c.MaxOutstanding != Unlimited {
		v.number("Keys.MaxOutstanding", &c.MaxOutstanding, 1000, 1, 1_000_000)
	}
	const mostKeys, mostBytes = 1_000_000_000, 1 << 50
	if c.Quota.Keys < 0 || c.Quota.Keys > mostKeys {
		v.bad("Keys.Quota.Keys", strconv.Itoa(c.Quota.Keys), "must be 1 to 1000000000, or 0 for no limit")
	}
	if c.Quota.Bytes < 0 || c.Quota.Bytes > mostBytes {
		v.bad("Keys.Quota.Bytes", strconv.FormatInt(c.Quota.Bytes, 10), "must be 1 to 1125899906842624, or 0 for no limit")
	}
	v.duration("Keys.Quota.Window", &c.Quota.Window, time.Hour, time.Second, 31*24*time.Hour)
}

func (c *RequestConfig) resolve(v *values) {
	if c.Body != BodyRaw && c.Body != BodyJSON {
		v.bad("Requests.Body", strconv.Itoa(int(c.Body)), "must be BodyRaw or BodyJSON")
	}
	c.Headers = v.names("Requests.Headers", c.Headers)
	slices.Sort(c.Headers)
	c.MaxBody = cmp.Or(c.MaxBody, 1<<20)
	if c.MaxBody < 1 || c.MaxBody > 1<<30 {
		v.bad("Requests.MaxBody", strconv.FormatInt(c.MaxBody, 10), "must be 1 to 1073741824 bytes, or 0 for 1 MiB")
	}
}

func (c *TxConfig) resolve(v *values) {
	c.Isolation = cmp.Or(c.Isolation, sql.LevelReadCommitted)
	if !slices.Contains([]sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}, c.Isolation) {
		v.bad("Transactions.Isolation", c.Isolation.String(), "must be sql.LevelReadCommitted, sql.LevelRepeatableRead or sql.LevelSerializable")
	}
	v.number("Transactions.Retries", &c.Retries, 10, 1, 1000)
	v.number("Transactions.GroupSize", &c.GroupSize, 1, 1, 1000)
}

func (c *FailureConfig) resolve(v *values, timeout time.Duration) {
	least := timeout + timeout/5
	v.duration("Failures.Lease", &c.Lease, max(30*time.Second, least), time.Second, 2*time.Hour)
	if c.Lease < least {
		v.bad("Failures.Lease", c.Lease.String(), "must be a fifth longer than Timeout, or a claim would be taken over from a living handler")
	}
	if c.Crashed < CrashedUnknown || c.Crashed > CrashedRecover {
		v.bad("Failures.Crashed", strconv.Itoa(int(c.Crashed)), "must be CrashedUnknown, CrashedTakeOver or CrashedRecover")
	}
	if c.Failed != FailedUnknown && c.Failed != FailedRelease {
		v.bad("Failures.Failed", strconv.Itoa(int(c.Failed)), "must be FailedUnknown or FailedRelease")
	}
	if (c.Crashed == CrashedRecover) != (c.Recover != nil) {
		v.bad("Failures.Recover", strconv.FormatBool(c.Recover != nil), "belongs to Crashed: CrashedRecover, which needs it")
	}
	if len(c.UniqueName) > maxKey {
		v.bad("Failures.UniqueName", strconv.Itoa(len(c.UniqueName))+" bytes", "must have at most "+strconv.Itoa(maxKey)+" bytes")
	}
}

func (c *AnswerConfig) resolve(v *values) {
	if c.InProgress < InProgressConflict || c.InProgress > InProgressWait {
		v.bad("Answers.InProgress", strconv.Itoa(int(c.InProgress)), "must be InProgressConflict, InProgressTooEarly, InProgressTooManyRequests, InProgressAccepted or InProgressWait")
	}
	v.duration("Answers.WaitTimeout", &c.WaitTimeout, 10*time.Second, time.Millisecond, time.Hour)
	v.duration("Answers.RetryAfter", &c.RetryAfter, time.Second, time.Second, time.Hour)
	c.ReusedStatus = cmp.Or(c.ReusedStatus, http.StatusUnprocessableEntity)
	if c.ReusedStatus != http.StatusUnprocessableEntity && c.ReusedStatus != http.StatusConflict {
		v.bad("Answers.ReusedStatus", strconv.Itoa(c.ReusedStatus), "must be 422 or 409")
	}
	if c.StatusPath != "" && (c.StatusPath[0] != '/' || !strings.HasSuffix(c.StatusPath, "/")) {
		v.bad("Answers.StatusPath", strconv.Quote(c.StatusPath), "must begin and end with a slash")
	}
	if c.InProgress == InProgressAccepted && c.StatusPath == "" {
		v.bad("Answers.StatusPath", `""`, "is needed by InProgressAccepted")
	}
	c.DocURL = cmp.Or(c.DocURL, defaultDoc)
	if c.Write == nil {
		c.Write = WriteProblem
	}
}

func (c *ResponseConfig) resolve(v *values) {
	if c.Storable == nil {
		c.Storable = StorableDefault
	}
	v.number("Responses.MaxSize", &c.MaxSize, 1<<20, 1, mostResponse)
	c.DropHeaders = v.names("Responses.DropHeaders", c.DropHeaders)
	c.KeepHeaders = v.names("Responses.KeepHeaders", c.KeepHeaders)
	if c.CompressAbove < 0 {
		v.bad("Responses.CompressAbove", strconv.Itoa(c.CompressAbove), "must not be negative; 0 means never")
	}
	v.number("Responses.LargeAbove", &c.LargeAbove, 64<<10, 1, mostResponse)
}

func (c *ExpiryConfig) resolve(v *values) {
	if c.RefuseFor < 0 || c.RefuseFor > year {
		v.bad("Expiry.RefuseFor", c.RefuseFor.String(), "must be 0 to "+year.String())
	}
	if c.Archive != nil && c.ArchivedElsewhere {
		v.bad("Expiry.ArchivedElsewhere", "true", "contradicts Archive; set one of them")
	}
	v.duration("Expiry.PurgeEvery", &c.PurgeEvery, time.Minute, time.Millisecond, 24*time.Hour)
	v.number("Expiry.PurgeBatch", &c.PurgeBatch, 1000, 1, 100_000)
}

// values collects the bad values of a Config.
type values struct{ errs []error }

func (v *values) bad(field, value, problem string) {
	v.errs = append(v.errs, badValue(field, value, problem))
}

func (v *values) duration(field string, value *time.Duration, fallback, least, most time.Duration) {
	*value = cmp.Or(*value, fallback)
	if *value < least || *value > most {
		v.bad(field, value.String(), fmt.Sprintf("must be %s to %s, or 0 for %s", least, most, fallback))
	}
}

func (v *values) number(field string, value *int, fallback, least, most int) {
	*value = cmp.Or(*value, fallback)
	if *value < least || *value > most {
		v.bad(field, strconv.Itoa(*value), fmt.Sprintf("must be %d to %d, or 0 for %d", least, most, fallback))
	}
}

// name checks the name of a header.
func (v *values) name(field, name string) {
	if !isHeaderName(name) {
		v.bad(field, strconv.Quote(name), "must be the name of a header")
	}
}

// names checks names of headers, and returns them in the form that requests have.
func (v *values) names(field string, names []string) []string {
	out := make([]string, len(names))
	for i, name := range names {
		v.name(field, name)
		out[i] = textproto.CanonicalMIMEHeaderKey(name)
	}
	return out
}

func isHeaderName(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' })
}
