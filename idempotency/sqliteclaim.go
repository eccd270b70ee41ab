package idempotency

import (
	"context"
	"time"

	"github.com/oncemill/oncemill/internal/turn"
)

// lookEvery is how often a claim that waits for the writer looks whether its key has been
// claimed.
const lookEvery = 50 * time.Millisecond

// claimInTurn claims a key on SQLite when it is its turn to write. The writer it waits for
// may be the handler of a copy that was a moment faster, and whose claim was not there when
// this one looked first: so it looks again while it waits, and gives its turn up if somebody
// else has the key. It returns that record.
func (s *SQLStore) claimInTurn(ctx context.Context, c Claim) (other Record, found bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		ticker := time.NewTicker(lookEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			r, there, err := s.find(ctx, c.ID)
			if err == nil && there && r.Owner.Token != c.Token {
				other, found = r, true
				cancel()
				return
			}
		}
	}()
	_, err = s.change(ctx, turn.Caller, s.q.claim, claimValues(c)...)
	cancel()
	<-looked
	if found {
		return other, true, nil // whatever the claim did, the key was another's
	}
	return Record{}, false, err
}
