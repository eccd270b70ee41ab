package idempotency

import (
	"context"
	"errors"

	"github.com/oncemill/oncemill/internal/nopanic"
)

// withinRate asks Config.Keys.RateLimit.
func (in *intent) withinRate(ctx context.Context) (decision, error) {
	if in.cfg.Keys.RateLimit == nil || in.unlimited {
		return decisionRun, nil
	}
	err := nopanic.Call(func() error { return in.cfg.Keys.RateLimit(ctx, in.scope) })
	var limit *RateLimitError
	switch {
	case errors.As(err, &limit):
		if in.retryIn = limit.RetryAfter; in.retryIn <= 0 {
			in.retryIn = in.cfg.Answers.RetryAfter
		}
		return decisionRateLimited, err
	case ctx.Err() != nil:
		return decisionTooLate, ctx.Err()
	case err == nil:
		return decisionRun, nil
	}
	return decisionRefused, err
}
