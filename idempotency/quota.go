package idempotency

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Quota limits what the keys of a caller (tenant and principal) take in a window of time.
// Windows begin at multiples of their length since 1970, by the database's clock. A caller
// above its quota gets 429 with the end of the window as Retry-After; what it has already
// stored is replayed all the same.
//
// The counts are in a table of their own ([QuotaMigrations]), a row for each caller. They are
// not written at every request: each process adds what it has counted about once a second
// for each active caller, before it claims a key. So each process lets a caller exceed the
// quota by up to a quarter of what it had left a second ago, and forgets what it counted in
// its last second if it crashes.
type Quota struct {
	// Keys is how many keys a caller may claim in a window and keep: those that a failure
	// releases are not counted. 1 to 1,000,000,000. Default: 0, which means any number.
	Keys int

	// Bytes is how many bytes of responses a caller may store in a window, as they are
	// stored (see ResponseConfig.CompressAbove). Requests that run when it is used up may
	// exceed it. 1 to 1 PiB.
	// Default: 0, which means any number.
	Bytes int64

	// Window is the length of a window. Engines on one store with the same length count
	// together. 1 s to 31 days. Default: 1 h.
	Window time.Duration
}

func (q *Quota) limited() bool { return q.Keys > 0 || q.Bytes > 0 }

// QuotaStore is a [Store] that counts what callers take. [SQLStore] and [MemoryStore] do.
type QuotaStore interface {
	Store

	// AddUsage adds to what a caller has taken in the current window of this length, and
	// returns the sums. The numbers may be negative or 0; a sum is never negative.
	AddUsage(ctx context.Context, caller Caller, window time.Duration, keys, bytes int64) (Usage, error)
}

// Usage is what a caller has taken in a window.
type Usage struct {
	Keys  int64
	Bytes int64
	Left  time.Duration // until the window ends
}

// quotas are what this process knows of its callers.
type quotas struct {
	mu      sync.Mutex
	callers map[Caller]*usage
}

// usage is what a caller has taken in this process since it was last added, and what it may
// take until then.
type usage struct {
	mu                  sync.Mutex
	keys, bytes         int64 // not yet added
	sentKeys, sentBytes int64 // being added: the sums that are known may lack them

	most      int64     // keys, being added or not yet, until they must be added
	mostBytes int64     // likewise bytes
	until     time.Time // when they must be added anyway

	over   time.Time // until then the caller is refused without asking the store
	resets time.Time // when the window ends

	counting *counting // nil: no claim counts
	known    time.Time // when a count was last used; one that began before is outdated
}

// of returns the usage of a caller. When there are too many callers, those that are known
// are forgotten with up to a second of their counts.
func (q *quotas) of(c Caller) *usage {
	q.mu.Lock()
	defer q.mu.Unlock()
	u := q.callers[c]
	if u == nil {
		if q.callers == nil || len(q.callers) >= maxAllowances {
			q.callers = map[Caller]*usage{}
		}
		u = &usage{}
		q.callers[c] = u
	}
	return u
}

// take takes a key without asking the store, or returns the count to wait for (other) or to
// do (self), or that the caller is over its quota.
func (u *usage) take() (taken, over bool, other, self *counting) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	switch {
	case now.Before(u.over):
		return false, true, nil, nil
	case u.keys+u.sentKeys < u.most && u.bytes+u.sentBytes < u.mostBytes && now.Before(u.until):
		u.keys++
		return true, false, nil, nil
	case u.counting != nil && now.Sub(u.counting.since) < countWait:
		return false, false, u.counting, nil
	}
	u.counting = &counting{done: make(chan struct{}), since: now}
	return false, false, nil, u.counting
}

// add adds to the counts.
func (u *usage) add(keys, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.keys, u.bytes = u.keys+keys, u.bytes+bytes
}

// flush returns the counts to add to the store, and a claim with them. What was counted in a
// window that has ended is forgotten.
func (u *usage) flush() (keys, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if time.Now().Before(u.resets) {
		keys, bytes = u.keys, u.bytes
	}
	u.keys, u.bytes = 0, 0
	keys++
	u.sentKeys, u.sentBytes = u.sentKeys+keys, u.sentBytes+bytes
	return keys, bytes
}

// answered ends what flush began.
func (u *usage) answered(keys, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.sentKeys, u.sentBytes = u.sentKeys-keys, u.sentBytes-bytes
}

// added takes what a count has found: sum includes what flush returned. It reports whether the
// claim may be made.
func (u *usage) added(self *counting, q *Quota, sum Usage) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	over := q.Keys > 0 && sum.Keys > int64(q.Keys) || q.Bytes > 0 && sum.Bytes >= q.Bytes
	if self.since.Before(u.known) { // it may not include what was taken since
		return !over
	}
	// Counted from before the store was asked, the window ends here no later than there: what is taken
	// in it is not carried into the next one.
	u.known, u.resets, u.until = now, self.since.Add(sum.Left), now.Add(allowanceTime)
	if u.resets.Before(u.until) {
		u.until = u.resets
	}
	if over {
		u.over = u.until
	}
	u.most, u.mostBytes = 1<<40, 1<<62
	if q.Keys > 0 {
		u.most = max(int64(q.Keys)-sum.Keys, 0) / 4
	}
	if q.Bytes > 0 {
		u.mostBytes = max(q.Bytes-sum.Bytes, 0) / 4
	}
	return !over
}

// done lets those go on that wait for a count.
func (u *usage) done(self *counting) {
	u.mu.Lock()
	defer u.mu.Unlock()
	close(self.done)
	if u.counting == self {
		u.counting = nil
	}
}

// withinQuota takes a key of the caller's quota. If there is none, the answer is the record
// of a key that the caller has already, or decisionOverQuota.
func (in *intent) withinQuota(ctx context.Context) (decision, Record, error) {
	u := in.quotas.of(in.claim.Caller)
	for {
		taken, over, other, self := u.take()
		switch {
		case taken:
			in.charged = u
			return decisionRun, Record{}, nil
		case over:
			return in.overQuota(ctx, u)
		case self != nil:
			return in.countUsage(ctx, u, self)
		}
		if err := other.wait(ctx); err != nil {
			return decisionStoreFailed, Record{}, err
		}
	}
}

func (in *intent) countUsage(ctx context.Context, u *usage, self *counting) (decision, Record, error) {
	defer u.done(self)
	keys, bytes := u.flush()
	began := time.Now()
	store, ok := in.store.(QuotaStore)
	if !ok {
		return decisionStoreFailed, Record{}, fmt.Errorf("%T counts no usage", in.store) // New has looked
	}
	sum, err := store.AddUsage(ctx, in.claim.Caller, in.cfg.Keys.Quota.Window, keys, bytes)
	in.telemetry.latency(ctx, "usage", began, err)
	u.answered(keys, bytes)
	if err != nil {
		u.add(keys-1, bytes) // counted twice, if the store has counted them
		return decisionStoreFailed, Record{}, err
	}
	if !u.added(self, &in.cfg.Keys.Quota, sum) {
		// At once, or it would count against the caller's claims in other processes.
		if _, err := store.AddUsage(ctx, in.claim.Caller, in.cfg.Keys.Quota.Window, -1, 0); err != nil {
			u.add(-1, 0)
		}
		return in.overQuota(ctx, u)
	}
	in.charged = u
	return decisionRun, Record{}, nil
}

// overQuota looks for a key that the caller has already.
func (in *intent) overQuota(ctx context.Context, u *usage) (decision, Record, error) {
	record, found, err := in.store.Find(ctx, in.claim.ID)
	switch {
	case err != nil:
		return decisionStoreFailed, Record{}, err
	case found:
		return in.judge(record), record, nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	in.retryIn = max(time.Until(u.resets), time.Second)
	return decisionOverQuota, Record{}, nil
}

// uncharge takes back the key that withinQuota has taken.
func (in *intent) uncharge() {
	if in.charged != nil {
		in.charged.add(-1, 0)
		in.charged = nil
	}
}

// charge counts what a run has stored. A key that may run again is not counted.
func (in *intent) charge(end ending) {
	if in.charged == nil {
		return
	}
	switch end.outcome {
	case outcomeStored:
		in.charged.add(0, int64(len(end.completion.Response)))
		in.charged = nil
	case outcomeReleased, outcomeTimedOut, outcomeContended, outcomeUncommitted, outcomeUnreachable, outcomeLostClaim:
		in.uncharge()
	case outcomeUnknown, outcomeUnstored, outcomeUncertain: // the key stays
	}
}
