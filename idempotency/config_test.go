package idempotency_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/idempotency"
)

// All bad values are reported at once, each by the full path of its field.
func TestNew_NamesEachBadField(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{
		Timeout: -1, Retention: -1,
		Keys:         idempotency.KeyConfig{Header: "a b", Methods: []string{http.MethodGet, "post"}, MaxOutstanding: -2},
		Requests:     idempotency.RequestConfig{Body: 7, Headers: []string{"X Tenant"}, MaxBody: -1},
		Transactions: idempotency.TxConfig{Isolation: sql.LevelSnapshot, Retries: -1, GroupSize: -1},
		Failures: idempotency.FailureConfig{
			Lease: -1, Crashed: 7, Failed: 7,
			Recover: func(context.Context, idempotency.Record) (idempotency.Recovery, error) {
				return idempotency.Recovery{}, nil
			},
		},
		Answers:   idempotency.AnswerConfig{InProgress: 7, WaitTimeout: -1, RetryAfter: -1, ReusedStatus: 200, StatusPath: "status"},
		Responses: idempotency.ResponseConfig{MaxSize: -1, DropHeaders: []string{"X-Secret:"}, CompressAbove: -1, LargeAbove: -1, Encryption: &idempotency.Encryption{Current: "a"}},
		Expiry:    idempotency.ExpiryConfig{RefuseFor: -1, PurgeEvery: -1, PurgeBatch: -1},
	})
	want := []string{
		"Scope", "Timeout", "Retention",
		"Keys.Header", "Keys.Methods", "Keys.MaxOutstanding",
		"Requests.Body", "Requests.Headers", "Requests.MaxBody",
		"Transactions.Isolation", "Transactions.Retries", "Transactions.GroupSize",
		"Failures.Lease", "Failures.Crashed", "Failures.Failed", "Failures.Recover",
		"Answers.InProgress", "Answers.WaitTimeout", "Answers.RetryAfter", "Answers.ReusedStatus", "Answers.StatusPath",
		"Responses.MaxSize", "Responses.DropHeaders", "Responses.CompressAbove", "Responses.LargeAbove",
		"Expiry.RefuseFor", "Expiry.PurgeEvery", "Expiry.PurgeBatch", "Responses.Encryption.Current",
	}
	for i, field := range want {
		want[i] = "idempotency.Config." + field
	}
	if got := badFields(err); !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

// A method in lower case is that of no request: all of them would pass without a key.
func TestNew_RefusesMethodsOfNoRequest(t *testing.T) {
	t.Parallel()
	for _, methods := range [][]string{{"post"}, {http.MethodPost, "Put"}, {""}} {
		_, err := idempotency.New(&idempotency.MemoryStore{}, idempotency.Config{
			Scope: idempotency.SingleTenant(), Keys: idempotency.KeyConfig{Methods: methods},
		})
		if got := badFields(err); !slices.Equal(got, []string{"idempotency.Config.Keys.Methods"}) {
			t.Errorf("%q: %v", methods, err)
		}
	}
}

// badFields returns the fields of all the ConfigErrors in err, without repetitions.
func badFields(err error) (fields []string) {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			fields = append(fields, badFields(one)...)
		}
		return slices.Compact(fields)
	}
	var bad *oncemill.ConfigError
	if errors.As(err, &bad) {
		return []string{bad.Field}
	}
	return nil
}

// A service that sets nothing but Timeout gets a lease that fits it.
func TestNew_DerivesTheLeaseFromTheTimeout(t *testing.T) {
	t.Parallel()
	store := &leases{Store: &idempotency.MemoryStore{}}
	for timeout, want := range map[time.Duration]time.Duration{
		0: 30 * time.Second, time.Second: 30 * time.Second, time.Minute: 72 * time.Second, time.Hour: 72 * time.Minute,
	} {
		engine := newEngine(t, store, func(c *idempotency.Config) { c.Timeout = timeout })
		do(t, engine.Middleware(ok("x")), post("/", "x", withKey(timeout.String())))
		if store.last != want {
			t.Errorf("timeout %s: lease %s, want %s", timeout, store.last, want)
		}
	}
}

// leases remembers the last lease that was asked for.
type leases struct {
	idempotency.Store
	last time.Duration
}

func (s *leases) Claim(ctx context.Context, c idempotency.Claim) (idempotency.Record, bool, error) {
	s.last = c.Lease
	return s.Store.Claim(ctx, c)
}
