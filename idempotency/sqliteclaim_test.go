package idempotency_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
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

// The first one's claim is seen, and released before the second one's turn: what the second
// has committed by then is its own, whatever it has seen.
func TestSQLStore_AClaimThatWasCommittedIsGranted(t *testing.T) {
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
	defer writer.Rollback() //nolint:errcheck // a no-op after the commit
	seen, committed := make(chan struct{}), make(chan struct{})
	var looks atomic.Int64
	q, slow := p.through(t)
	look := p.expand(t, "from {{idempotency}} as i")
	slow.asked = func(query string) {
		if strings.Contains(query, look) && looks.Add(1) == 1 {
			close(seen)
			<-committed // the answer comes late
		}
	}
	slow.committed = func() { close(committed) }
	second := first
	rand.Read(second.Token[:])
	type result struct {
		record idempotency.Record
		found  bool
		err    error
	}
	done := make(chan result, 1)
	go func() {
		r, found, err := q.store.ClaimInTurn(t.Context(), second)
		done <- result{r, found, err}
	}()
	<-seen
	_, err = writer.ExecContext(t.Context(), p.expand(t, `delete from {{idempotency}}`))
	if err := errors.Join(err, writer.Commit()); err != nil {
		t.Fatal(err)
	}
	if r := <-done; r.err != nil || !r.found || r.record.Owner.Token != second.Token {
		t.Errorf("found %t: %+v, %v", r.found, r.record, r.err)
	}
}
