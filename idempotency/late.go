package idempotency

import "sync"

// lateClaims are the claims of this process that the store has not answered. It may still
// make them: a server that was frozen, or a connection that was slow, gets to them later.
// Nothing has run under such a claim, and nothing will, so its key need not wait for the end
// of the lease, and its outcome is not unknown.
type lateClaims struct {
	mu     sync.Mutex
	owners map[Owner]struct{}
}

// mostLate is how many are remembered. When there are more all are forgotten, and their
// leases end by themselves.
const mostLate = 10_000

func (l *lateClaims) add(o Owner) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owners == nil || len(l.owners) >= mostLate {
		l.owners = map[Owner]struct{}{}
	}
	l.owners[o] = struct{}{}
}

// made reports whether a record is such a claim.
func (l *lateClaims) made(r Record) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, late := l.owners[r.Owner]
	return late && r.State == StateStarted
}
