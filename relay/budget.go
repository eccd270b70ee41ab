package relay

import "time"

// budget limits how many retrying messages may fail again.
type budget struct {
	tokens float64   // messages
	at     time.Time // when they were counted
}

// spend counts a retrying message that has failed again.
func (b *budget) spend(now time.Time) {
	b.left(now)
	b.tokens = max(b.tokens-1, -retriesAtOnce) // a lost connection fails very many at once
}

// left returns how many retrying messages may be tried now.
func (b *budget) left(now time.Time) int {
	if !b.at.IsZero() {
		b.tokens += now.Sub(b.at).Seconds() * retriesPerSecond
	} else {
		b.tokens = retriesAtOnce
	}
	b.tokens, b.at = min(b.tokens, retriesAtOnce), now
	return int(max(0, b.tokens))
}
