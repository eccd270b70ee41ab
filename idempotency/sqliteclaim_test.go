package idempotency_test

import (
	"context"
	"crypto/rand"
	"testing"
	"time"
)

// A claim that looked for its key a moment too early does not wait for the writer, who may be
// the handler of the one that was faster.
func TestSQLStore_AClaimLooksAgainWhileItWaitsForTheWriter(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	first := newClaim()
	if _, granted, err := p.store.Claim(t.Context(), first); !granted || err != nil {
		t.Fatal(granted, err)
	}
	writer, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Rollback() //nolint:errcheck // nothing of it is wanted
	second := first
	rand.Read(second.Token[:])
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	r, found, err := p.store.ClaimInTurn(ctx, second)
	if err != nil || !found || r.Owner.Token != first.Token {
		t.Errorf("found %t: %+v, %v", found, r, err)
	}
}
