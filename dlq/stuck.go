package dlq

import (
	"context"
	"fmt"
	"time"
)

// Stuck is a number of dead letters that wait for a worker to act on them: of one source or
// consumer, in one state (replaying or discarding).
type Stuck struct {
	State    State
	Source   Source
	Consumer string        // empty if a relay wrote them
	Count    int64         // at most 10,000 in each state
	Oldest   time.Duration // since somebody asked for it
}

// StuckAfter is how long a replay or a discard normally takes at most: workers look for them
// every second or two.
const StuckAfter = time.Minute

const stuckLook = 10_000

// Stuck returns the replays and discards that nobody has carried out for StuckAfter or
// longer: no inbox with Config.Replays runs for the consumer, or no relay, or the message
// waits in the consumer's queue. It looks at the oldest 10,000 dead letters of each state.
func (s *Store) Stuck(ctx context.Context) ([]Stuck, error) {
	found, err := s.store.Stuck(ctx, StuckAfter, stuckLook)
	if err != nil {
		return nil, fmt.Errorf("dlq: count stuck dead letters: %w", err)
	}
	stuck := make([]Stuck, len(found))
	for i, c := range found {
		stuck[i] = Stuck{State: State(c.State), Source: Source(c.Source), Consumer: c.Consumer, Count: c.N, Oldest: c.Oldest}
	}
	return stuck, nil
}
