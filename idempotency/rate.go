package idempotency

import (
	"cmp"
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
	case err == nil:
		return decisionRun, nil
	case errors.As(err, &limit):
		in.retryIn = cmp.Or(limit.RetryAfter, in.cfg.Answers.RetryAfter)
		return decisionRateLimited, err
	}
	return decisionRefused, err
}
