package idempotency_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

// lateCopy claims the key of first a moment before first does, on SQLite, and learns
// nothing of its first look until first has it and a writer is busy. looks is called for
// each later look, once it has its answer.
func lateCopy(t *testing.T, p *testDB, first idempotency.Claim, looks func(number int64), committed func()) (copied idempotency.Claim, writer *sql.Tx, done <-chan claimAnswer) {
	t.Helper()
	q, slow := p.through(t)
	looked, claimed := make(chan struct{}), make(chan struct{})
	look := p.expand(t, "from {{idempotency}} as i")
	var number atomic.Int64
	slow.asked = func(query string) {
		if !strings.Contains(query, look) {
			return
		}
		if n := number.Add(1); n > 1 {
			looks(n)
			return
		}
		close(looked)
		<-claimed
	}
	slow.committed = committed
	copied = first
	rand.Read(copied.Token[:])
	answers := make(chan claimAnswer, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		record, granted, err := q.store.Claim(ctx, copied)
		answers <- claimAnswer{record, granted, err}
	}()
	<-looked
	if _, granted, err := p.store.Claim(t.Context(), first); !granted || err != nil {
		t.Fatal(granted, err)
	}
	writer, err := p.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = writer.Rollback() })
	close(claimed)
	return copied, writer, answers
}

type claimAnswer struct {
	record  idempotency.Record
	granted bool
	err     error
}

// A claim that looked for its key a moment too early does not wait for the writer, who may be
// the handler of the one that was faster.
func TestSQLStore_AClaimLooksAgainWhileItWaitsForTheWriter(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	first := newClaim()
	_, _, done := lateCopy(t, p, first, func(int64) {}, nil)
	if a := <-done; a.err != nil || a.granted || a.record.Owner.Token != first.Token {
		t.Errorf("got %+v", a)
	}
}

// The first one's claim is seen, and released before the second one's turn: what the second
// has committed by then is its own, whatever it has seen.
func TestSQLStore_AClaimThatWasCommittedIsGranted(t *testing.T) {
	t.Parallel()
	p := onSQLite(t)
	first := newClaim()
	seen, committed := make(chan struct{}), make(chan struct{})
	second, writer, done := lateCopy(t, p, first, func(number int64) {
		if number == 2 {
			close(seen)
			<-committed // the answer comes late
		}
	}, func() { close(committed) })
	<-seen
	_, err := writer.ExecContext(t.Context(), p.expand(t, `delete from {{idempotency}}`))
	if err := errors.Join(err, writer.Commit()); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a.err != nil || !a.granted || a.record.Owner.Token != second.Token {
		t.Errorf("got %+v", a)
	}
}
