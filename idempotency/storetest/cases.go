package storetest

import (
	"bytes"
	"crypto/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oncemill/oncemill/idempotency"
)

func (s *suite) claimOnce() {
	c := newClaim()
	owner := s.granted(c)
	record, granted := s.claim(again(c))
	if granted || record.State != idempotency.StateStarted || record.Owner != owner {
		s.Errorf("granted %t: %+v", granted, record)
	}
	s.granted(newClaim())
}

const rivals = 16

func (s *suite) claimRace() {
	c := newClaim()
	var winners atomic.Int64
	var racing sync.WaitGroup
	for range rivals {
		racing.Go(func() {
			if _, granted := s.claim(again(c)); granted {
				winners.Add(1)
			}
		})
	}
	racing.Wait()
	if winners.Load() != 1 {
		s.Errorf("%d were granted", winners.Load())
	}
}

func (s *suite) find() {
	c := newClaim()
	s.expectAbsent(c.ID)
	owner := s.granted(c)
	r := s.mustFind(c.ID)
	if r.ID != c.ID || r.Caller != c.Caller || r.Fingerprint != c.Fingerprint || r.State != idempotency.StateStarted || r.Owner != owner ||
		r.Endpoint != c.Endpoint || r.CorrelationID != c.CorrelationID || r.TraceID != c.TraceID || r.Response != nil {
		s.Errorf("found %+v", r)
	}
	if r.LeaseLeft <= 0 || r.LeaseLeft > c.Lease || r.ExpiresIn <= 0 || r.ExpiresIn > c.Retention || r.CreatedAt.IsZero() || !r.CompletedAt.IsZero() {
		s.Errorf("found times %+v", r)
	}
}

func (s *suite) complete() {
	for _, change := range []func(*idempotency.Completion){
		func(*idempotency.Completion) {},
		func(c *idempotency.Completion) { c.State, c.Response = idempotency.StateNotReplayable, nil },
	} {
		c, done := newClaim(), completion()
		change(&done)
		owner := s.granted(c)
		s.ok(s.store.Complete(s.Context(), c.ID, owner, done))
		r, granted := s.claim(again(c))
		if granted || r.State != done.State || r.Status != 201 || !bytes.Equal(r.Response, done.Response) ||
			r.Location != done.Location || r.ResourceID != done.ResourceID || r.Owner != owner || r.Fingerprint != c.Fingerprint {
			s.Errorf("granted %t: %+v", granted, r)
		}
		if r.ExpiresIn <= 0 || r.ExpiresIn > done.Retention || r.CompletedAt.IsZero() {
			s.Errorf("times %+v", r)
		}
	}
}

func (s *suite) completeLarge() {
	c, done := newClaim(), completion()
	done.Large, done.Response = true, make([]byte, 300_000)
	rand.Read(done.Response)
	s.ok(s.store.Complete(s.Context(), c.ID, s.granted(c), done))
	if r := s.mustFind(c.ID); !bytes.Equal(r.Response, done.Response) {
		s.Errorf("%d bytes came back", len(r.Response))
	}
}

func (s *suite) release() {
	c := newClaim()
	s.ok(s.store.Release(s.Context(), c.ID, s.granted(c)))
	s.expectAbsent(c.ID)
	s.granted(again(c))
}

func (s *suite) takeOver() {
	c := newClaim()
	owner := s.granted(c)
	if _, granted, err := s.store.TakeOver(s.Context(), again(c), owner); err != nil || granted {
		s.Errorf("taken over while the lease runs: %v", err)
	}
	c = newClaim()
	c.Lease = 20 * time.Millisecond
	owner = s.granted(c)
	s.leaseEnds(c.ID)
	next := again(c)
	next.Lease = time.Minute
	if _, granted, err := s.store.TakeOver(s.Context(), next, idempotency.Owner{Token: owner.Token, Fence: owner.Fence + 1}); err != nil || granted {
		s.Errorf("taken over from another owner: %v", err)
	}
	r, granted, err := s.store.TakeOver(s.Context(), next, owner)
	if err != nil || !granted || r.Owner.Token != next.Token || r.Owner.Fence <= owner.Fence {
		s.Fatalf("granted %t: %+v %v", granted, r, err)
	}
	if found := s.mustFind(c.ID); found.Owner != r.Owner || found.LeaseLeft <= 0 {
		s.Errorf("found %+v", found)
	}
	s.expectStale(s.store.Complete(s.Context(), c.ID, owner, completion()))
	s.ok(s.store.Complete(s.Context(), c.ID, r.Owner, completion()))
}

func (s *suite) takeOverRace() {
	c := newClaim()
	c.Lease = 20 * time.Millisecond
	owner := s.granted(c)
	s.leaseEnds(c.ID)
	c.Lease = time.Minute
	var winners atomic.Int64
	var racing sync.WaitGroup
	for range rivals {
		racing.Go(func() {
			_, granted, err := s.store.TakeOver(s.Context(), again(c), owner)
			s.ok(err)
			if granted {
				winners.Add(1)
			}
		})
	}
	racing.Wait()
	if winners.Load() != 1 {
		s.Errorf("%d were granted", winners.Load())
	}
}

func (s *suite) extend() {
	c := newClaim()
	c.Lease = 20 * time.Millisecond
	owner := s.granted(c)
	s.leaseEnds(c.ID)
	s.ok(s.store.Extend(s.Context(), c.ID, owner, time.Minute))
	if _, granted, err := s.store.TakeOver(s.Context(), again(c), owner); err != nil || granted {
		s.Errorf("taken over: %v", err)
	}
	s.ok(s.store.Extend(s.Context(), c.ID, owner, 0))
	s.leaseEnds(c.ID)
}

func (s *suite) stale() {
	c := newClaim()
	owner := s.granted(c)
	for _, stranger := range []idempotency.Owner{{Token: owner.Token, Fence: owner.Fence + 1}, {Fence: owner.Fence}, {}} {
		s.expectStale(s.store.Complete(s.Context(), c.ID, stranger, completion()))
		s.expectStale(s.store.Release(s.Context(), c.ID, stranger))
		s.expectStale(s.store.Extend(s.Context(), c.ID, stranger, time.Hour))
	}
	if r := s.mustFind(c.ID); r.Owner != owner || r.State != idempotency.StateStarted || r.LeaseLeft > c.Lease {
		s.Errorf("found %+v", r)
	}
	s.expectStale(s.store.Complete(s.Context(), newClaim().ID, owner, completion()))
}

func (s *suite) completedStays() {
	c := newClaim()
	owner := s.granted(c)
	s.ok(s.store.Complete(s.Context(), c.ID, owner, completion()))
	s.expectStale(s.store.Release(s.Context(), c.ID, owner))
	s.expectStale(s.store.Extend(s.Context(), c.ID, owner, time.Minute))
	other := completion()
	other.Status = 500
	s.expectStale(s.store.Complete(s.Context(), c.ID, owner, other))
	if _, granted, err := s.store.TakeOver(s.Context(), again(c), owner); err != nil || granted {
		s.Errorf("taken over: %v", err)
	}
	if r := s.mustFind(c.ID); r.Status != 201 || r.State != idempotency.StateCompleted {
		s.Errorf("found %+v", r)
	}
}

func (s *suite) expire() {
	c, done := newClaim(), completion()
	done.Retention = 30 * time.Millisecond
	s.ok(s.store.Complete(s.Context(), c.ID, s.granted(c), done))
	s.until("the response has expired", func() bool {
		_, found, err := s.store.Find(s.Context(), c.ID)
		s.ok(err)
		return !found
	})
	s.granted(again(c))
}

func (s *suite) refuse() {
	c, done := newClaim(), completion()
	done.Retention, done.Refuse = 30*time.Millisecond, time.Hour
	s.ok(s.store.Complete(s.Context(), c.ID, s.granted(c), done))
	s.until("the response has expired", func() bool { return s.mustFind(c.ID).State == idempotency.StateExpired })
	for range 2 {
		if r, granted := s.claim(again(c)); granted || r.State != idempotency.StateExpired || r.Response != nil {
			s.Errorf("granted %t: %+v", granted, r)
		}
		if _, err := s.store.Purge(s.Context(), 100); err != nil {
			s.Error(err)
		}
	}
}

func (s *suite) outstanding() {
	first := newClaim()
	expect := func(limit, want int) {
		s.Helper()
		if n, err := s.store.Outstanding(s.Context(), first.Caller, limit); err != nil || n != want {
			s.Errorf("%d of at most %d outstanding, want %d: %v", n, limit, want, err)
		}
	}
	expect(10, 0)
	owner := s.granted(first)
	for range 2 {
		c := newClaim()
		c.Caller = first.Caller
		s.granted(c)
	}
	s.granted(newClaim())
	expect(10, 3)
	expect(2, 2)
	s.ok(s.store.Complete(s.Context(), first.ID, owner, completion()))
	expect(10, 2)
	died := newClaim()
	died.Caller = first.Caller
	owner = s.granted(died)
	expect(10, 3)
	s.ok(s.store.Extend(s.Context(), died.ID, owner, 0)) // as the end of its lease
	s.leaseEnds(died.ID)
	expect(10, 2)
}

func (s *suite) purge() {
	short := completion()
	short.Retention = time.Millisecond
	for range 7 {
		c := newClaim()
		s.ok(s.store.Complete(s.Context(), c.ID, s.granted(c), short))
	}
	kept, started := newClaim(), newClaim()
	s.ok(s.store.Complete(s.Context(), kept.ID, s.granted(kept), completion()))
	started.Retention = time.Millisecond // its lease still runs
	owner := s.granted(started)
	total := 0
	s.until("seven are purged", func() bool {
		n, err := s.store.Purge(s.Context(), 3)
		s.ok(err)
		if n > 3 {
			s.Errorf("%d at once", n)
		}
		total += n
		return total >= 7
	})
	if n, err := s.store.Purge(s.Context(), 100); n != 0 || err != nil || total != 7 {
		s.Errorf("%d, then %d more: %v", total, n, err)
	}
	s.mustFind(kept.ID)
	s.ok(s.store.Complete(s.Context(), started.ID, owner, completion()))
}

func (s *suite) interrupted() {
	c := newClaim()
	c.Lease, c.Retention = 20*time.Millisecond, 40*time.Millisecond
	s.granted(c)
	s.until("it is forgotten", func() bool {
		_, found, err := s.store.Find(s.Context(), c.ID)
		s.ok(err)
		return !found
	})
	c.Retention = time.Hour
	s.granted(again(c))
}

func (s *suite) outlived() {
	c := newClaim()
	c.Retention = time.Millisecond
	s.granted(c)
	s.pause(5 * time.Millisecond)
	s.mustFind(c.ID)
	if r, granted := s.claim(again(c)); granted || r.Owner.Token != c.Token {
		s.Errorf("granted %t: %+v", granted, r)
	}
}

// forgetLarge reuses keys whose response was large.
func (s *suite) forgetLarge() {
	c, large := newClaim(), completion()
	large.Response, large.Large, large.Retention = bytes.Repeat([]byte("large"), 50_000), true, time.Millisecond
	s.ok(s.store.Complete(s.Context(), c.ID, s.granted(c), large))
	s.until("it is forgotten", func() bool {
		_, found, err := s.store.Find(s.Context(), c.ID)
		s.ok(err)
		return !found
	})
	next := again(c)
	large.Response, large.Retention = bytes.Repeat([]byte("other"), 50_000), time.Hour
	s.ok(s.store.Complete(s.Context(), c.ID, s.granted(next), large))
	if r := s.mustFind(c.ID); !bytes.Equal(r.Response, large.Response) {
		s.Errorf("a response of %d bytes that begins with %.10q", len(r.Response), r.Response)
	}
}

// churn uses a few keys in all ways concurrently.
func (s *suite) churn() {
	var held [3]atomic.Int64
	var claims [3]idempotency.Claim
	for k := range claims {
		claims[k] = newClaim()
	}
	const grants = 100
	deadline := time.Now().Add(30 * time.Second)
	var granted atomic.Int64
	var working sync.WaitGroup
	for worker := range 8 {
		working.Go(func() {
			for i := 0; time.Now().Before(deadline) && granted.Load() < grants; i++ {
				k := (worker + i) % len(claims)
				c := again(claims[k])
				c.Durable = i%2 == 0
				r, ok, err := s.store.Claim(s.Context(), c)
				switch {
				case err != nil: // it may have come and gone too often
					continue
				case !ok:
					if r.Owner.Token == c.Token || r.State == idempotency.StateCompleted && !bytes.HasPrefix(r.Response, r.Owner.Token[:]) {
						s.Errorf("refused by its own, or with another's response: %+v", r)
					}
					s.pause(100 * time.Microsecond)
					continue
				}
				granted.Add(1)
				if !held[k].CompareAndSwap(0, 1) {
					s.Error("two have the key")
				}
				s.pause(time.Duration(i%3) * time.Millisecond)
				held[k].Store(0)
				done := completion()
				done.Response, done.Large, done.Retention = append(c.Token[:], "response"...), i%2 == 0, time.Duration(i%4)*time.Millisecond
				if i%3 == 0 {
					s.ok(s.store.Release(s.Context(), c.ID, r.Owner))
				} else {
					s.ok(s.store.Complete(s.Context(), c.ID, r.Owner, done))
				}
				if i%10 == 0 {
					_, err := s.store.Purge(s.Context(), 10)
					s.ok(err)
				}
			}
		})
	}
	working.Wait()
	if n := granted.Load(); n < grants {
		s.Errorf("only %d were granted", n)
	}
	for _, c := range claims {
		s.until("the last response is forgotten", func() bool {
			_, found, err := s.store.Find(s.Context(), c.ID)
			s.ok(err)
			return !found
		})
		s.granted(again(c))
	}
}

func (s *suite) usage() {
	store, ok := s.store.(idempotency.QuotaStore)
	if !ok {
		return
	}
	const window = 31 * 24 * time.Hour
	one, other := newClaim().Caller, newClaim().Caller
	for _, c := range []struct {
		caller      idempotency.Caller
		window      time.Duration
		keys, bytes int64
		want        idempotency.Usage
	}{
		{one, window, 2, 10, idempotency.Usage{Keys: 2, Bytes: 10}},
		{one, window, 1, 5, idempotency.Usage{Keys: 3, Bytes: 15}},
		{one, window, -1, 0, idempotency.Usage{Keys: 2, Bytes: 15}},
		{other, window, 1, 1, idempotency.Usage{Keys: 1, Bytes: 1}},
		{one, window / 2, 1, 1, idempotency.Usage{Keys: 1, Bytes: 1}},
		{one, window, -5, -20, idempotency.Usage{}},
	} {
		sum, err := store.AddUsage(s.Context(), c.caller, c.window, c.keys, c.bytes)
		left := sum.Left
		sum.Left = 0
		if err != nil || sum != c.want || left <= 0 || left > c.window {
			s.Errorf("%+v, %s left, %v; want %+v", sum, left, err, c.want)
		}
	}
}
