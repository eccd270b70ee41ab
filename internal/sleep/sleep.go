// Package sleep waits without outliving a context.
package sleep

import (
	"context"
	"time"
)

// For waits for d and reports whether it did so before ctx ended.
func For(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
