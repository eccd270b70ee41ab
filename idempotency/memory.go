package idempotency

import (
	"context"
	"sync"
	"time"
)

// MemoryStore is a [Store] for unit tests. It is lost with its process, is not shared with
// other processes, and has no transactions. The zero value is empty and ready to use. Its
// clock is that of package time.
type MemoryStore struct {
	mu      sync.Mutex
	records map[ID]*memoryRecord
	usage   map[memoryWindow]*Usage
}

// memoryWindow identifies the counts of a caller.
type memoryWindow struct {
	caller Caller
	length time.Duration
	began  time.Time
}

type memoryRecord struct {
	Record
	leaseUntil, expiresAt, forgetAt time.Time
}

// dead reports whether the record is due for purging.
func (r *memoryRecord) dead(now time.Time) bool {
	return !r.forgetAt.After(now) && (r.State != StateStarted || !r.leaseUntil.After(now))
}

func (r *memoryRecord) at(now time.Time) Record {
	out := r.Record
	out.LeaseLeft, out.ExpiresIn = r.leaseUntil.Sub(now), r.expiresAt.Sub(now)
	if out.State != StateStarted && out.ExpiresIn <= 0 {
		out.State, out.Response = StateExpired, nil
	}
	return out
}

// Claim implements [Store.Claim].
func (s *MemoryStore) Claim(_ context.Context, c Claim) (Record, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if r := s.records[c.ID]; r != nil && !r.dead(now) {
		return r.at(now), false, nil
	}
	if s.records == nil {
		s.records = map[ID]*memoryRecord{}
	}
	r := &memoryRecord{
		Record: Record{
			ID: c.ID, Caller: c.Caller, Fingerprint: c.Fingerprint, State: StateStarted,
			Owner: Owner{Token: c.Token, Fence: 1}, Endpoint: c.Endpoint,
			CorrelationID: c.CorrelationID, TraceID: c.TraceID, CreatedAt: now,
		},
		leaseUntil: now.Add(c.Lease), expiresAt: now.Add(c.Retention), forgetAt: now.Add(c.Retention),
	}
	s.records[c.ID] = r
	return r.at(now), true, nil
}

// TakeOver implements [Store.TakeOver].
func (s *MemoryStore) TakeOver(_ context.Context, c Claim, from Owner) (Record, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	r := s.owned(c.ID, from)
	if r == nil || r.leaseUntil.After(now) {
		return Record{}, false, nil
	}
	r.Owner = Owner{Token: c.Token, Fence: from.Fence + 1}
	r.leaseUntil, r.expiresAt, r.forgetAt = now.Add(c.Lease), now.Add(c.Retention), now.Add(c.Retention)
	return r.at(now), true, nil
}

// owned returns the started record that owner has, or nil. The caller holds the lock.
func (s *MemoryStore) owned(id ID, owner Owner) *memoryRecord {
	if r := s.records[id]; r != nil && r.Owner == owner && r.State == StateStarted {
		return r
	}
	return nil
}

// Find implements [Store.Find].
func (s *MemoryStore) Find(_ context.Context, id ID) (Record, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	r := s.records[id]
	if r == nil || r.dead(now) {
		return Record{}, false, nil
	}
	return r.at(now), true, nil
}

// Outstanding implements [Store.Outstanding].
func (s *MemoryStore) Outstanding(_ context.Context, caller Caller, limit int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, now := 0, time.Now()
	for _, r := range s.records {
		if n < limit && r.Caller == caller && r.State == StateStarted && r.leaseUntil.After(now) {
			n++
		}
	}
	return n, nil
}

// AddUsage implements [QuotaStore].
func (s *MemoryStore) AddUsage(_ context.Context, caller Caller, window time.Duration, keys, bytes int64) (Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	in := memoryWindow{caller, window, now.Truncate(window)}
	if s.usage[in] == nil {
		for other := range s.usage { // the windows that have ended
			if !other.began.Add(other.length).After(now) {
				delete(s.usage, other)
			}
		}
		if s.usage == nil {
			s.usage = map[memoryWindow]*Usage{}
		}
		s.usage[in] = &Usage{}
	}
	u := s.usage[in]
	u.Keys, u.Bytes, u.Left = max(u.Keys+keys, 0), max(u.Bytes+bytes, 0), in.began.Add(window).Sub(now)
	return *u, nil
}

// Extend implements [Store.Extend].
func (s *MemoryStore) Extend(_ context.Context, id ID, owner Owner, lease time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.owned(id, owner)
	if r == nil {
		return ErrStaleOwner
	}
	r.leaseUntil = time.Now().Add(lease)
	return nil
}

// Complete implements [Store.Complete].
func (s *MemoryStore) Complete(_ context.Context, id ID, owner Owner, c Completion) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.owned(id, owner)
	if r == nil {
		return ErrStaleOwner
	}
	now := time.Now()
	r.State, r.Status, r.Response = c.State, c.Status, c.Response
	r.Location, r.ResourceID, r.CompletedAt = c.Location, c.ResourceID, now
	r.expiresAt, r.forgetAt = now.Add(c.Retention), now.Add(c.Retention+c.Refuse)
	return nil
}

// Release implements [Store.Release].
func (s *MemoryStore) Release(_ context.Context, id ID, owner Owner) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owned(id, owner) == nil {
		return ErrStaleOwner
	}
	delete(s.records, id)
	return nil
}

// Purge implements [Store.Purge].
func (s *MemoryStore) Purge(_ context.Context, limit int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, n := time.Now(), 0
	for id, r := range s.records {
		if n == limit {
			break
		}
		if r.dead(now) {
			delete(s.records, id)
			n++
		}
	}
	return n, nil
}
