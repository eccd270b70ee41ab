package inbox

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// checkAge refuses a message whose id may have been purged.
func (in *Inbox) checkAge(ctx context.Context, w *work) error {
	d, ok := DeliveryFromContext(ctx)
	if !ok || in.cfg.DeadLetters == nil || w.replay != nil {
		return nil
	}
	created := d.CreatedAt()
	// Query the database's clock only if it may matter.
	if known := in.clock.latest(); created.IsZero() || !known.IsZero() && known.Sub(created) < in.cfg.Retention/2 {
		return nil
	}
	now, err := ask(ctx, in, in.store.Now)
	if err != nil {
		return fmt.Errorf("check age: %w", err)
	}
	in.clock.set(now)
	if age := now.Sub(created); age > in.cfg.Retention-in.margin() {
		return fmt.Errorf("%w: created at %s, %s ago", ErrTooOld, created.UTC().Format(time.RFC3339), age.Round(time.Second))
	}
	return nil
}

// margin covers the clocks of two databases, and the time between the check and the claim.
func (in *Inbox) margin() time.Duration { return min(time.Hour, in.cfg.Retention/10) }

// clock estimates the database's clock. The clock of this process may be wrong by years;
// the time that passes is measured well, except while the machine sleeps, which only the
// process's clock sees. So of both the later one counts: a clock that is ahead costs a
// query, one that is behind nothing.
type clock struct {
	mu       sync.Mutex
	database time.Time
	read     time.Time // when, by this process
}

func (c *clock) set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.database, c.read = now, time.Now()
}

// latest returns the zero time before the first set.
func (c *clock) latest() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.database.IsZero() {
		return time.Time{}
	}
	now := time.Now()
	if estimate := c.database.Add(now.Sub(c.read)); estimate.After(now) {
		return estimate
	}
	return now
}
