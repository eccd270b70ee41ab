package idempotency

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/trace"
)

// core is what the parts of an engine share.
type core struct {
	store     Store
	claimKey  func(context.Context, Claim) (Record, bool, error) // of the store, possibly together with others
	cfg       Config
	codec     codec
	hash      hasher
	telemetry *telemetry
	tracer    trace.Tracer
	limits    limits
	quotas    quotas
	late      lateClaims
	events    events

	// draw returns a random duration below another, which is positive.
	draw func(below time.Duration) time.Duration

	// at is called at named moments of a request, for tests that crash there.
	at func(point string)
}

// problem returns the problem of a kind.
func (c *core) problem(kind string) Problem {
	return newProblem(kind, c.cfg.Answers.DocURL, c.cfg.Answers.RetryAfter)
}

// open decodes the response of a record.
func (c *core) open(ctx context.Context, record Record) ([]byte, error) {
	if record.plain != nil {
		return record.plain, nil
	}
	plain, err := c.codec.decode(record.binding(), record.Response)
	if errors.Is(err, ErrNotEncrypted) {
		c.telemetry.plainRefused.Add(ctx, 1)
	}
	return plain, err
}

// reveal decrypts the fields of a record other than its response.
func (c *core) reveal(record Record) Record {
	record.Location = c.codec.decodeText(record.binding(), "location", record.Location)
	record.ResourceID = c.codec.decodeText(record.binding(), "resource id", record.ResourceID)
	return record
}
