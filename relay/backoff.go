package relay

import (
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// draw returns a random time from zero to below a bound. The engine gets its own, so
// that a simulation is repeatable.
type draw func(below time.Duration) time.Duration

// newBackOff returns exponential backoff with full jitter: each wait is drawn
// from zero to twice an interval that doubles up to a second.
func newBackOff() backoff.BackOff { return drawnBackOff(rand.N) }

func drawnBackOff(d draw) backoff.BackOff {
	return jittered{backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(25*time.Millisecond),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0),
		backoff.WithMaxInterval(time.Second),
		backoff.WithMaxElapsedTime(0),
	), d}
}

// jittered draws each wait from zero to twice its current interval.
type jittered struct {
	*backoff.ExponentialBackOff
	draw draw
}

func (b jittered) NextBackOff() time.Duration { return b.draw(2 * b.ExponentialBackOff.NextBackOff()) }
