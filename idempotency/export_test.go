package idempotency

import (
	"context"

	"github.com/oncemill/oncemill"
)

// At has hook called at the named points of every request.
func (e *Engine) At(hook func(point string)) { e.at = hook }

// FrameForTest hashes fields as fingerprints and ids do.
func FrameForTest(fields ...string) ID { return hashID(newHasher(oncemill.Secret{}), fields...) }

// ClaimAll makes claims by one statement.
func (s *SQLStore) ClaimAll(ctx context.Context, claims []Claim) (records []Record, found []bool, err error) {
	return s.claimAll(ctx, claims)
}

// Token is what stands behind Config.Answers.StatusPath.
func (id ID) Token() string { return statusToken(id) }
