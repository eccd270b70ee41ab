// Package storetest tests implementations of idempotency.Store:
//
//	func TestMyStore(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) idempotency.Store { return NewMyStore(...) })
//	}
package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"
	"time"

	"github.com/oncemill/oncemill/idempotency"
	"github.com/oncemill/oncemill/internal/sleep"
)

// Run runs the suite. open returns an empty store for a test, and closes with t.Cleanup
// what it opened. The tests run in parallel and take about two seconds.
func Run(t *testing.T, open func(t *testing.T) idempotency.Store) {
	t.Helper()
	for name, test := range map[string]func(*suite){
		"a claim is granted once":                                          (*suite).claimOnce,
		"of many who claim at once one is granted":                         (*suite).claimRace,
		"a record is found as it was claimed":                              (*suite).find,
		"a response comes back as it was stored":                           (*suite).complete,
		"a large response comes back as it was stored":                     (*suite).completeLarge,
		"a released key is absent":                                         (*suite).release,
		"a claim is taken over when its lease has ended":                   (*suite).takeOver,
		"of many who take over at once one is granted":                     (*suite).takeOverRace,
		"an extended lease keeps others away":                              (*suite).extend,
		"a stale owner changes nothing":                                    (*suite).stale,
		"a completed claim is neither released nor changed":                (*suite).completedStays,
		"a response expires, and the key may be used again":                (*suite).expire,
		"an expired key is refused for as long as it should":               (*suite).refuse,
		"a caller's started keys are counted":                              (*suite).outstanding,
		"what a caller takes adds up":                                      (*suite).usage,
		"a purge deletes what is over, and nothing else":                   (*suite).purge,
		"an interrupted claim outlives its retention no more than it must": (*suite).interrupted,
		"a started claim is found while its lease runs":                    (*suite).outlived,
		"a purged key with a large response may be used again":             (*suite).forgetLarge,
		"of all who claim, complete, release and purge one has the key":    (*suite).churn,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(&suite{t, open(t)})
		})
	}
}

type suite struct {
	*testing.T
	store idempotency.Store
}

// newClaim returns a claim of a key that nobody has.
func newClaim() idempotency.Claim {
	c := idempotency.Claim{
		Endpoint: "POST /orders", Lease: time.Minute, Retention: time.Hour,
		CorrelationID: "correlation", TraceID: "trace", Durable: true,
	}
	for _, b := range [][]byte{c.ID[:], c.Caller[:], c.Fingerprint[:], c.Token[:]} {
		rand.Read(b)
	}
	return c
}

// again returns another attempt to claim the same key.
func again(c idempotency.Claim) idempotency.Claim {
	rand.Read(c.Token[:])
	return c
}

func (s *suite) claim(c idempotency.Claim) (idempotency.Record, bool) {
	s.Helper()
	record, granted, err := s.store.Claim(s.Context(), c)
	if err != nil {
		s.Fatalf("claim: %v", err)
	}
	return record, granted
}

// granted claims a key that must be free.
func (s *suite) granted(c idempotency.Claim) idempotency.Owner {
	s.Helper()
	record, granted := s.claim(c)
	if !granted || record.State != idempotency.StateStarted || record.Owner.Token != c.Token {
		s.Fatalf("granted %t: %+v", granted, record)
	}
	return record.Owner
}

func (s *suite) mustFind(id idempotency.ID) idempotency.Record {
	s.Helper()
	record, found, err := s.store.Find(s.Context(), id)
	if err != nil || !found {
		s.Fatalf("found %t: %v", found, err)
	}
	return record
}

func (s *suite) expectAbsent(id idempotency.ID) {
	s.Helper()
	if record, found, err := s.store.Find(s.Context(), id); err != nil || found {
		s.Errorf("found %t %+v: %v", found, record, err)
	}
}

func (s *suite) ok(err error) {
	s.Helper()
	if err != nil {
		s.Error(err)
	}
}

func (s *suite) expectStale(err error) {
	s.Helper()
	if !errors.Is(err, idempotency.ErrStaleOwner) {
		s.Errorf("got %v, want ErrStaleOwner", err)
	}
}

// until waits for a condition that becomes true with time.
func (s *suite) until(what string, done func() bool) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), 20*time.Second)
	defer cancel()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			s.Fatalf("waited in vain until %s", what)
		}
	}
}

func (s *suite) pause(d time.Duration) {
	sleep.For(s.Context(), d)
}

func (s *suite) leaseEnds(id idempotency.ID) {
	s.Helper()
	s.until("the lease ends", func() bool { return s.mustFind(id).LeaseLeft <= 0 })
}

func completion() idempotency.Completion {
	return idempotency.Completion{
		State: idempotency.StateCompleted, Status: 201, Response: []byte("\x00\xffresponse"), Retention: time.Hour,
		Location: "/orders/7", ResourceID: "7",
	}
}
